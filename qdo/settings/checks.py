"""Checks of settings: each returns why a value is invalid, or None."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from qdo.brokers.registry import address_error
from qdo.queues import MAX_GLOBS_CHARACTERS, name_error
from qdo.system.sqlite import sqlite_address_error
from qdo.text import hide_credentials

Check = Callable[[Any], "str | None"]


def between(low: float, high: float) -> Check:
    """Return a check for numbers from `low` to `high`; NaN is invalid."""

    def check(value: Any) -> str | None:
        if low <= value <= high:
            return None
        return f"got {value!r}, but it must be from {low:g} to {high:g}"

    return check


def one_of(*choices: str) -> Check:
    """Return a check for one of several texts."""

    def check(value: Any) -> str | None:
        return None if value in choices else f"it must be {_either(choices)}, got {value!r}"

    return check


def some_of(*choices: str) -> Check:
    """Return a check for a list of some of several texts."""

    def check(value: Any) -> str | None:
        wrong = [each for each in value if each not in choices]
        return f"each must be {_either(choices)}, got {wrong[0]!r}" if wrong else None

    return check


def non_empty(value: str) -> str | None:
    """Check a text that must not be empty."""
    return None if value else "it must not be empty"


def globs(value: tuple[str, ...]) -> str | None:
    """Check globs; an empty one, as in a list that begins with a comma, matches nothing."""
    if not all(value):
        return f"{', '.join(value)!r} contains an empty glob"
    size = sum(map(len, value))
    if size > MAX_GLOBS_CHARACTERS:
        return (
            f"it must have at most {MAX_GLOBS_CHARACTERS} characters, got {size}; use fewer globs"
        )
    return None


def non_empty_globs(value: tuple[str, ...]) -> str | None:
    """Check a list that needs at least one glob."""
    return globs(value) if value else "it must contain a glob; * matches every queue"


def app(value: str) -> str | None:
    """Check a text that is empty, the name of a znode, or MODULE:APP."""
    if ":" in value:
        return None if _is_reference(value) else f"it must be NAME or MODULE:APP, got {value!r}"
    fault = name_error(value) if value else None
    return f"{value!r} cannot be a znode name: {fault}" if fault else None


def import_reference(value: str) -> str | None:
    """Check a text that is empty or MODULE:NAME."""
    if not value or _is_reference(value):
        return None
    return f"it must have the form MODULE:NAME, got {value!r}"


def _is_reference(value: str) -> bool:
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", value) is not None


def broker_url(value: str) -> str | None:
    """Check the address of a broker; nothing is opened."""
    return address_error(value)


def coordinator_url(value: str) -> str | None:
    """Check the address of a coordinator."""
    if value.startswith("zookeeper://"):
        if "@" in value:
            return "a ZooKeeper address must not contain a user name or a password"
        hosts, _, chroot = value.removeprefix("zookeeper://").partition("/")
        return _hosts_fault(hosts) or _chroot_fault(chroot)
    if value.startswith("sqlite:"):
        return sqlite_address_error(value)
    shown = hide_credentials(value)
    return f"it must have the form sqlite:PATH or zookeeper://HOST:PORT,.../CHROOT, got {shown!r}"


def _hosts_fault(hosts: str) -> str | None:
    for host in hosts.split(","):
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(\d{1,5}))?", host)
        if found is None or int(found.group(2) or 1) not in range(1, 65536):
            return f"each address must be HOST or HOST:PORT, got {host!r}"
    return None


def _chroot_fault(chroot: str) -> str | None:
    if "?" in chroot:
        return f"a ZooKeeper address has no options, got '/{chroot}'"
    if chroot and not all(chroot.rstrip("/").split("/")):
        return f"the chroot must be a znode path, got '/{chroot}'"
    return None


def listen_address(value: str) -> str | None:
    """Check an address to listen at; empty means none."""
    if not value:
        return None
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})", value)
    if found is None or int(found[1]) > 65535:
        return f"it must be HOST:PORT, such as 127.0.0.1:9180, or [IPV6]:PORT, got {value[:120]!r}"
    return None


def account(value: str) -> str | None:
    """Check an account at the coordinator. The text may contain a password: it is not shown."""
    if not value or (re.fullmatch(r"(digest|sasl):[^:\s]+", value) and value.isprintable()):
        return None
    return "it must be digest:NAME or sasl:NAME; the password belongs elsewhere"


def accounts(value: tuple[str, ...]) -> str | None:
    """Check accounts in access control lists."""
    for each in value:
        if not re.fullmatch(r"digest:[^:\s]+:[A-Za-z0-9+/]{27}=|sasl:[^:\s]+|x509:\S.*", each):
            scheme = each.partition(":")[0]
            return (
                "each account must be digest:NAME:HASH (`qdo acl account` prints it), sasl:NAME or "
                f"x509:SUBJECT, got one that begins with {scheme[:10]!r}"
            )
    return None


def zone(value: str) -> str | None:
    """Check the name of a zone; empty means none."""
    if re.fullmatch(r"[\w.-]{0,100}", value):
        return None
    return f"it must have at most 100 letters, digits, '.', '-' and '_', got {value[:120]!r}"


def namespace(value: str) -> str | None:
    """Check an absolute path of a znode."""
    if value.startswith("/") and all(value[1:].split("/")):
        return None
    return f"it must be an absolute znode path such as /a/b, got {value!r}"


def _either(choices: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
