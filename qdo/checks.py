"""What a value of a setting must be like; each check returns why it will not do, or None."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from qdo.errors import SettingsError
from qdo.names import name_fault

Check = Callable[[Any], "str | None"]


def between(low: float, high: float) -> Check:
    """Return a check for numbers from `low` to `high`; NaN is not."""

    def check(value: Any) -> str | None:
        return None if low <= value <= high else f"{value!r} is not from {low:g} to {high:g}"

    return check


def one_of(*choices: str) -> Check:
    """Return a check for a choice."""

    def check(value: Any) -> str | None:
        return None if value in choices else f"{value!r} is none of {', '.join(choices)}"

    return check


def filled(value: str) -> str | None:
    """Check a text that must not be empty."""
    return None if value else "it is empty"


def globs(value: tuple[str, ...]) -> str | None:
    """Check globs; an empty one, as in a list that begins with a comma, matches nothing."""
    return None if all(value) else f"{', '.join(value)!r} has an empty glob"


def some_globs(value: tuple[str, ...]) -> str | None:
    """Check globs of which there must be one."""
    return globs(value) if value else "there is no glob: * stands for every queue"


def app_name(value: str) -> str | None:
    """Check a text that is empty or the name of a znode."""
    fault = name_fault(value) if value else None
    return f"{value!r} cannot be a znode name: {fault}" if fault else None


def reference(value: str) -> str | None:
    """Check a text that is empty or MODULE:NAME."""
    if not value or re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", value):
        return None
    return f"{value!r} is not of the form MODULE:NAME"


def broker_url(value: str) -> str | None:
    """Check the address of a broker; nothing is opened."""
    known = ("sqlite:PATH", "sqs://REGION/PREFIX", "kinesis://REGION/STREAM")
    if value.startswith(("sqs:", "kinesis:")):
        return _aws_fault(value)
    return _sqlite_fault(value) or _scheme_fault(value, known)


def _aws_fault(value: str) -> str | None:
    # Late, because brokers stand above settings; this module of theirs needs nothing but errors.
    from qdo.brokers import aws_address

    read = aws_address.sqs_address if value[0] == "s" else aws_address.kinesis_address
    try:
        read(value)
    except SettingsError as error:
        return str(error.details["reason"])
    return None


def coordinator_url(value: str) -> str | None:
    """Check the address of a coordinator."""
    if value.startswith("zookeeper://"):
        hosts, _, chroot = value.removeprefix("zookeeper://").partition("/")
        return _hosts_fault(hosts) or _chroot_fault(chroot)
    known = ("sqlite:PATH", "zookeeper://HOST:PORT,.../CHROOT")
    return _sqlite_fault(value) or _scheme_fault(value, known)


def _scheme_fault(value: str, known: Iterable[str]) -> str | None:
    schemes = {form.partition(":")[0] for form in known}
    if value.partition(":")[0] in schemes and ":" in value:
        return None
    return f"{value!r} is no address that is known here: {' or '.join(known)}"


def _sqlite_fault(value: str) -> str | None:
    if not value.startswith("sqlite:"):
        return None
    path = value.removeprefix("sqlite:")
    if not path or path.endswith("/"):
        return f"{value!r} names no file: write sqlite:PATH"
    if path.startswith("//") or path == ":memory:" or "\0" in path:
        return f"{value!r} is no path of a file: write sqlite:some/path or sqlite:/some/path"
    return None


def _hosts_fault(hosts: str) -> str | None:
    for host in hosts.split(","):
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(\d{1,5}))?", host)
        if found is None or int(found.group(2) or 1) not in range(1, 65536):
            return f"{host!r} is no HOST or HOST:PORT"
    return None


def _chroot_fault(chroot: str) -> str | None:
    if chroot and not all(chroot.rstrip("/").split("/")):
        return f"'/{chroot}' is no path for a chroot"
    return None


def namespace(value: str) -> str | None:
    """Check an absolute path of a znode."""
    if value.startswith("/") and all(value[1:].split("/")):
        return None
    return f"{value!r} is no absolute znode path such as /a/b"


