"""The names, the content and the deletion of entries in the action log."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qdo.coordination.znodes.values import encode, load, text_of
from qdo.fleet.names import overlap
from qdo.queues import is_glob

# Maximum number of characters in a reason. Longer other texts are cut to this length.
MAX_TEXT = 500
# Maximum number of values before or after a change. An entry omits further values.
MAX_KEYS = 20
# Maximum number of entries in the log. The leader deletes the oldest entries, and entries older
# than `KEEP_SECONDS`.
MAX_ENTRIES = 5000
KEEP_SECONDS = 30 * 86400.0
# Maximum number of outputs of actions. The leader deletes outputs in the same way.
MAX_OUTPUTS = 100
KEEP_OUTPUT_SECONDS = 3600.0
# An entry whose time is further in the future has a wrong time, and counts as the oldest entry.
AHEAD_SECONDS = 86400.0
_NAME = re.compile(r"([0-9]{13})-[0-9a-f]{8}", re.ASCII)
_TEXTS = ("by", "account", "command", "target", "reason")

Values = Mapping[str, "str | int | float | bool | None"]


def is_selected(command: str, target: str, glob: str) -> bool:
    return fnmatchcase(command, glob) or is_target(target, glob)


def is_target(target: str, glob: str) -> bool:
    """Return whether the target of a change matches a glob."""
    # The targets of some commands, such as `qdo pause`, are globs. Such a target matches if one
    # name can match both globs.
    parts = target.split()
    return fnmatchcase(target, glob) or any(is_glob(each) and overlap(each, glob) for each in parts)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change by a command."""

    id: str
    # Unix time by the clock of the process that wrote the entry.
    at: float
    by: str = ""
    # The command's account at the coordinator; "" without an account.
    account: str = ""
    command: str = ""
    # The name of the changed thing, such as a queue.
    target: str = ""
    # The values before and after the change; None if the entry has no values.
    before: Values | None = None
    after: Values | None = None
    reason: str = ""
    fault: str | None = None

    def matches(self, glob: str) -> bool:
        return is_selected(self.command, self.target, glob)

    def encode(self) -> bytes:
        value: dict[str, Any] = {name: cut(getattr(self, name)) for name in _TEXTS}
        return encode({**value, "from": _bounded(self.before), "to": _bounded(self.after)})

    @classmethod
    def parse(
        cls, id: str, data: bytes, written: float = 0.0, refused: str | None = None
    ) -> AuditEntry:
        """Return the entry in a node. `refused` is the reason if the node could not be read."""
        at = entry_time(id, written)
        value, fault = load(data)
        fault = refused or fault
        if fault is None and not isinstance(value.get("command"), str):
            fault = "the entry must name its command"
        if fault is not None:
            return cls(id, at, fault=fault)
        return cls(
            id,
            at,
            before=_bounded(value.get("from")),
            after=_bounded(value.get("to")),
            **{name: cut(text_of(value.get(name))) for name in _TEXTS},
        )


def entry_name(at: float, random: str) -> str:
    """Return the name of an entry with a Unix time and eight random hexadecimal digits."""
    return f"{int(at * 1000):013}-{random}"


def entry_time(name: str, otherwise: float = 0.0) -> float:
    found = _NAME.fullmatch(name)
    return otherwise if found is None else int(found[1]) / 1000


def surplus(
    names: Collection[str], now: float, most: int = MAX_ENTRIES, keep_seconds: float = KEEP_SECONDS
) -> list[str]:
    """Return the names of entries to delete: those beyond `most`, and those that are too old."""

    def age_order(name: str) -> float:
        # Names in another form, or with an impossible time, count as the oldest names.
        at = entry_time(name)
        return at if at <= now + AHEAD_SECONDS else 0.0

    ordered = sorted(names, key=lambda name: (age_order(name), name))
    many = max(0, len(ordered) - most)
    old = [name for name in ordered[many:] if 0.0 < age_order(name) < now - keep_seconds]
    return [*ordered[:many], *old]


def old_outputs(names: Collection[str], now: float) -> list[str]:
    return surplus(names, now, MAX_OUTPUTS, KEEP_OUTPUT_SECONDS)


def _bounded(values: Any) -> dict[str, Any] | None:
    if not isinstance(values, Mapping):
        return None
    bounded: dict[str, Any] = {}
    for name, value in list(values.items())[:MAX_KEYS]:
        plain = value is None or isinstance(value, bool | int | float)
        # Nested values become texts.
        bounded[cut(str(name))] = value if plain else cut(str(value))
    return bounded


def cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
