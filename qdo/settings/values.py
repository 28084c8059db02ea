"""Declares settings, converts text to values, and checks the values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qdo.brokers.registry import kind_of, parse_error
from qdo.errors import SettingsError
from qdo.jobs.policy_tables import LiveRuleTable, QueuePolicy, RuleTable, read_tables
from qdo.postgresql.url import coordinator_address
from qdo.queues import MAX_GLOBS_CHARACTERS, name_error
from qdo.text import wrong_form

Check = Callable[[Any], "str | None"]

# The variable that names the TOML file if no flag names a file.
CONFIG_VARIABLE = "QDO_CONFIG"
ENVIRONMENT_PREFIX = "QDO_"
# Password of the account at the coordinator. It is not a setting, because `qdo config` lists
# settings.
PASSWORD_VARIABLE = "QDO_COORDINATOR_PASSWORD"  # noqa: S105 - the name of a variable
# Origin of a default value.
DEFAULT = "default"
# Origin of settings that workers read from the coordinator.
LIVE = "live settings"
_KIND_NAMES = {
    "str": "text",
    "int": "an integer",
    "float": "a number of seconds",
    "bool": "true or false",
    "globs": "a list of globs",
}


def between(low: float, high: float) -> Check:
    def check(value: Any) -> str | None:
        if low <= value <= high:  # false for NaN
            return None
        return f"got {value!r}, but it must be from {low:g} to {high:g}"

    return check


def one_of(*choices: str) -> Check:
    def check(value: Any) -> str | None:
        return None if value in choices else f"it must be {_either(choices)}, got {value!r}"

    return check


def some_of(*choices: str) -> Check:
    def check(value: Any) -> str | None:
        wrong = [each for each in value if each not in choices]
        return f"each must be {_either(choices)}, got {wrong[0]!r}" if wrong else None

    return check


def globs(value: tuple[str, ...]) -> str | None:
    # An empty glob, for example from a list that begins with a comma, matches nothing.
    if not all(value):
        return f"{', '.join(value)!r} contains an empty glob"
    size = sum(map(len, value))
    if size > MAX_GLOBS_CHARACTERS:
        return (
            f"it must have at most {MAX_GLOBS_CHARACTERS} characters, got {size}; use fewer globs"
        )
    return None


def non_empty_globs(value: tuple[str, ...]) -> str | None:
    return globs(value) if value else "it must contain a glob; * matches every queue"


def app(value: str) -> str | None:
    """Check a text, which may be empty, the name of a znode, or MODULE:APP."""
    if ":" in value:
        return None if _is_reference(value) else f"it must be NAME or MODULE:APP, got {value!r}"
    fault = name_error(value) if value else None
    return f"{value!r} cannot be a znode name: {fault}" if fault else None


def import_reference(value: str) -> str | None:
    if not value or _is_reference(value):
        return None
    return f"it must have the form MODULE:NAME, got {value!r}"


def _is_reference(value: str) -> bool:
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", value) is not None


def broker_url(value: str) -> str | None:
    return kind_of(value).address_error(value)


def coordinator_url(value: str) -> str | None:
    if value.startswith("zookeeper://"):
        if "@" in value:
            return "a ZooKeeper address must not contain a user name or a password"
        hosts, _, chroot = value.removeprefix("zookeeper://").partition("/")
        return _hosts_fault(hosts) or _chroot_fault(chroot)
    if value.startswith("sqlite:"):
        from qdo.system.sqlite import sqlite_address_error

        return sqlite_address_error(value)
    if value.startswith("postgresql://"):
        return parse_error(coordinator_address, value)
    return wrong_form(
        value,
        "sqlite:PATH",
        "postgresql://USER@HOST/DATABASE",
        "zookeeper://HOST:PORT,.../CHROOT",
    )


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
    if not value:
        return None
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})", value)
    if found is None or int(found[1]) > 65535:
        return f"it must be HOST:PORT, such as 127.0.0.1:9180, or [IPV6]:PORT, got {value[:120]!r}"
    return None


def account(value: str) -> str | None:
    # Do not show the text, because it may contain a password.
    if not value or (re.fullmatch(r"(digest|sasl):[^:\s]+", value) and value.isprintable()):
        return None
    return "it must be digest:NAME or sasl:NAME; the password belongs elsewhere"


def accounts(value: tuple[str, ...]) -> str | None:
    for each in value:
        if not re.fullmatch(r"digest:[^:\s]+:[A-Za-z0-9+/]{27}=|sasl:[^:\s]+|x509:\S.*", each):
            scheme = each.partition(":")[0]
            return (
                "each account must be digest:NAME:HASH (`qdo admin acl account` prints it),"
                f" sasl:NAME or x509:SUBJECT, got one that begins with {scheme[:10]!r}"
            )
    return None


def zone(value: str) -> str | None:
    if re.fullmatch(r"[\w.-]{0,100}", value):
        return None
    return f"it must have at most 100 letters, digits, '.', '-' and '_', got {value[:120]!r}"


def address(value: str) -> str | None:
    if len(value) <= 200 and value.isprintable() and not any(map(str.isspace, value)):
        return None
    return f"it must have at most 200 printable characters and no space, got {value[:220]!r}"


def namespace(value: str) -> str | None:
    if value.startswith("/") and all(value[1:].split("/")):
        return None
    return f"it must be an absolute znode path such as /a/b, got {value!r}"


def _either(choices: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of one setting."""

    name: str
    # "str", "int", "float", "bool", "globs" for a tuple of text, or "tables" for values that only a
    # file can contain.
    kind: str
    default: Any
    help: str
    unit: str
    check: Check | None
    # Whether the setting may change while processes run.
    live: bool = False

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def convert(declaration: Declaration, value: Any, origin: str) -> Any:
    """Convert a value to the setting's type; raise SettingsError for an invalid value."""
    if declaration.kind == "tables":
        return _read_tables(declaration.name, value, origin)
    try:
        result = _READERS[declaration.kind](value)
    except (TypeError, ValueError, OverflowError):
        result = None
    if result is None:
        raise SettingsError(
            name=declaration.name,
            reason=f"it must be {_KIND_NAMES[declaration.kind]}, got {value!r}"
            f"{from_origin(origin)}",
        )
    fault = declaration.check(result) if declaration.check else None
    if fault:
        unit = f" {declaration.unit}" if declaration.unit else ""
        raise SettingsError(name=declaration.name, reason=f"{fault}{unit}{from_origin(origin)}")
    return result


def from_origin(origin: str) -> str:
    """Return the suffix of an error that names the origin of a value; "" for a default value."""
    return "" if origin == DEFAULT else f" (from {origin})"


def _read_tables(name: str, value: Any, origin: str) -> tuple[QueuePolicy, ...]:
    if isinstance(value, (list, tuple)):
        rule = LiveRuleTable if origin == LIVE else RuleTable
        return read_tables(value, from_origin(origin), rule)
    raise SettingsError(
        name=name,
        reason=f"it must be a list of tables, got {value!r}{from_origin(origin)}; the environment "
        f"cannot hold tables: write [[{name}]] into the TOML file ({CONFIG_VARIABLE} names it)",
    )


def _read_str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_globs(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):  # separated by commas, as in the environment
        return tuple(each.strip() for each in value.split(",")) if value else ()
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return None


def _read_int(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return float(value)
    return value if isinstance(value, float) else None


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower())
    return value if isinstance(value, bool) else None


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": _read_str,
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "globs": _read_globs,
}
