"""The value of the node `settings`: the live settings of an app, and a proposal for others."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from qdo.coordination.znodes.layout import is_version_name
from qdo.coordination.znodes.values import encode, load, shown, unix_time
from qdo.fleet_errors import LiveSettingsSizeError

MAX_TEXT_BYTES = 64 * 1024
"""Of one version. The node holds two, and JSON may need three times as many bytes for each."""
MAX_WHY_CHARACTERS = 500
KEPT_VERSIONS = 100
_MAX_WHO_CHARACTERS = 200
_MAX_NUMBER = 10**9
_ID = re.compile(r"[0-9a-f]{8,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SettingsVersion:
    """One version of the live settings, in force or proposed.

    :ivar id: names it; a version that is proposed again gets another one.
    :ivar number: counts the versions that were in force.
    :ivar text: the settings as TOML.
    :ivar who: user and host of its author.
    :ivar at: when it was proposed, Unix time by the clock of its author.
    :ivar why: reason for people.
    """

    id: str
    number: int
    text: str
    who: str = ""
    at: float = 0.0
    why: str = ""

    def dump(self) -> dict[str, Any]:
        """Return its JSON."""
        value: dict[str, Any] = {"id": self.id, "number": self.number, "text": self.text}
        return value | {"who": self.who, "at": self.at, "why": self.why}

    def encode(self) -> bytes:
        return encode(self.dump())

    @classmethod
    def parse(cls, value: Any) -> SettingsVersion:
        """Return a version from its JSON.

        :raises ValueError: it is not one.
        """
        if not isinstance(value, dict):
            raise ValueError(f"a version must be an object, got {shown(value)}")
        id, number, text, at = (value.get(key) for key in ("id", "number", "text", "at"))
        if not isinstance(id, str) or _ID.fullmatch(id) is None:
            raise ValueError(
                f"the id of a version must be 8 to 32 hexadecimal digits, got {shown(id)}"
            )
        if type(number) is not int or not 0 < number < _MAX_NUMBER:
            raise ValueError(
                f"the number of a version must be from 1 to {_MAX_NUMBER}, got {shown(number)}"
            )
        if not isinstance(text, str) or len(text.encode()) > MAX_TEXT_BYTES:
            raise ValueError(
                f"the text of a version must have at most {MAX_TEXT_BYTES} bytes, got {shown(text)}"
            )
        who, why = (found if isinstance(found := value.get(key), str) else "" for key in _TEXTS)
        time = unix_time(at) or 0.0
        return cls(id, number, text, who[:_MAX_WHO_CHARACTERS], time, why[:MAX_WHY_CHARACTERS])


_TEXTS = ("who", "why")


def surplus_versions(names: Collection[str], now: float) -> list[str]:
    """Return the names of version nodes beyond the newest `KEPT_VERSIONS`."""
    versions = sorted(filter(is_version_name, names))
    return versions[:-KEPT_VERSIONS]


@dataclass(frozen=True, slots=True)
class SettingsNode:
    """What the node says.

    :ivar current: the version in force; None: there are no live settings.
    :ivar proposal: what every worker checks; None: nothing is proposed.
    :ivar fault: why the node cannot be read, None if it can. Then the others are None.
    """

    current: SettingsVersion | None = None
    proposal: SettingsVersion | None = None
    fault: str | None = None

    @property
    def number(self) -> int:
        """The number of the version in force, 0 without one."""
        return 0 if self.current is None else self.current.number

    @property
    def text(self) -> str:
        """The settings in force as TOML."""
        return "" if self.current is None else self.current.text

    @classmethod
    def parse(cls, data: bytes | None) -> SettingsNode:
        """Parse a node. One bad version makes the whole node unreadable."""
        value, fault = load(data)
        if fault is not None:
            return cls(fault=fault)
        try:
            current, proposal = (
                None if value.get(key) is None else SettingsVersion.parse(value[key])
                for key in ("current", "proposal")
            )
        except ValueError as error:
            return cls(fault=str(error))
        return cls(current, proposal)

    def encode(self) -> bytes:
        found = {"current": self.current, "proposal": self.proposal}
        return encode({key: each.dump() for key, each in found.items() if each is not None})


def check_size(text: str) -> None:
    """Raise LiveSettingsSizeError for live settings that are too long."""
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise LiveSettingsSizeError(limit=MAX_TEXT_BYTES, found=len(text.encode()))
