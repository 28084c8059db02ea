"""Declarations of settings, and the conversion of text to their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qdo.errors import SettingsError
from qdo.jobs.policy_tables import QueuePolicy, read_tables
from qdo.settings.checks import Check

CONFIG_VARIABLE = "QDO_CONFIG"
"""Names the TOML file if no flag does."""


ENVIRONMENT_PREFIX = "QDO_"


PASSWORD_VARIABLE = "QDO_COORDINATOR_PASSWORD"  # nosec B105 # the name of a variable
"""Password of the account at the coordinator. Not a setting: `qdo config` lists settings."""


DEFAULT = "default"
"""Origin of a value that was not set."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of one setting.

    :ivar kind: "str", "int", "float", "bool", "globs" for a tuple of text, or "tables" for values
        that only a file can express.
    :ivar live: whether it may be changed while processes run.
    """

    name: str
    kind: str
    default: Any
    help: str
    unit: str
    check: Check | None
    live: bool = False

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return "--" + self.name.replace("_", "-")


def convert(declaration: Declaration, value: Any, origin: str) -> Any:
    """Return `value` in the setting's type; text, as in the environment, is parsed.

    :raises SettingsError: it has the wrong type or is out of range.
    """
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
    """Return the origin of a value as errors append it, "" for the default."""
    return "" if origin == DEFAULT else f" (from {origin})"


def _read_tables(name: str, value: Any, origin: str) -> tuple[QueuePolicy, ...]:
    if isinstance(value, (list, tuple)):
        return read_tables(value, from_origin(origin))
    raise SettingsError(
        name=name,
        reason=f"it must be a list of tables, got {value!r}{from_origin(origin)}; the environment "
        f"cannot hold tables: write [[{name}]] into the TOML file ({CONFIG_VARIABLE} names it)",
    )


def _read_str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_globs(value: Any) -> tuple[str, ...] | None:
    """Read a list of text, or one text with commas, as in the environment."""
    if isinstance(value, str):
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


_KIND_NAMES = {
    "str": "text",
    "int": "an integer",
    "float": "a number of seconds",
    "bool": "true or false",
    "globs": "a list of globs",
}
