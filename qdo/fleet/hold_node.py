"""The value of the node `holds`: the queues paused in the whole fleet, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from qdo.coordination.znodes.values import encode, load, shown, string_tuple, unix_time
from qdo.queues import MAX_GLOBS_CHARACTERS, QueueFilter, is_path_part

MAX_HOLDS = 100
"""Holds of an app; every worker compares every queue with all of them."""
MAX_REASON_CHARACTERS = 500
MAX_BYTES = 64 * 1024
"""Of a node: twice what `MAX_HOLDS` ordinary holds take."""
_ID = re.compile(r"[0-9a-f]{8,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hold:
    """Paused queues.

    :ivar id: names the hold for `qdo resume`.
    :ivar queues: globs of their names.
    :ivar why: reason for people.
    :ivar who: user and host of its maker.
    :ivar at: when it was made, Unix time by the clock of its maker.
    :ivar until: Unix time at which it ends, None for no end.
    :ivar by: path of the ephemeral node of its maker: it ends when this node is gone. "" for a
        pause, which needs no process.
    """

    id: str
    queues: tuple[str, ...]
    why: str = ""
    who: str = ""
    at: float = 0.0
    until: float | None = None
    by: str = ""

    def is_over(self, now: float) -> bool:
        """Return whether its time is over at a Unix time."""
        return self.until is not None and now >= self.until

    def dump(self) -> dict[str, Any]:
        """Return its JSON."""
        value: dict[str, Any] = {"id": self.id, "queues": list(self.queues), "why": self.why}
        value |= {"who": self.who, "at": self.at}
        if self.until is not None:
            value["until"] = self.until
        if self.by:
            value["by"] = self.by
        return value


@dataclass(frozen=True, slots=True)
class HoldNode:
    """What the node says.

    :ivar holds: in the order in which they were made.
    :ivar fault: why it cannot be read, None if it can. Then `holds` is empty.
    """

    holds: tuple[Hold, ...] = ()
    fault: str | None = None

    @classmethod
    def parse(cls, data: bytes | None) -> HoldNode:
        """Parse a node. One bad hold makes the whole node unreadable: nobody guesses half of it."""
        if data is not None and len(data) > MAX_BYTES:
            return cls(fault=f"it must have at most {MAX_BYTES} bytes, got {len(data)}")
        value, fault = load(data)
        if fault is not None:
            return cls(fault=fault)
        found = value.get("holds", [])
        if not isinstance(found, list) or len(found) > MAX_HOLDS:
            reason = f"the key 'holds' must be a list of at most {MAX_HOLDS}, got {shown(found)}"
            return cls(fault=reason)
        try:
            holds = tuple(map(_parsed, found))
        except ValueError as error:
            return cls(fault=str(error))
        if sum(len(glob) for hold in holds for glob in hold.queues) > MAX_GLOBS_CHARACTERS:
            reason = f"globs must have at most {MAX_GLOBS_CHARACTERS} characters together"
            return cls(fault=reason)
        return cls(holds)

    def encode(self) -> bytes:
        return encode({"holds": [hold.dump() for hold in self.holds]})


def _parsed(value: Any) -> Hold:
    """Return a hold; raise ValueError for a value that is not one."""
    if not isinstance(value, dict):
        raise ValueError(f"a hold must be an object, got {shown(value)}")
    id, globs, by, until = (value.get(key) for key in ("id", "queues", "by", "until"))
    queues = string_tuple(globs)
    if not isinstance(id, str) or _ID.fullmatch(id) is None:
        raise ValueError(f"the id of a hold must be 8 to 32 hexadecimal digits, got {shown(id)}")
    if not isinstance(globs, list) or len(queues) != len(globs) or not all(queues) or not queues:
        raise ValueError(f"the queues of hold {id} must be a list of globs, got {shown(globs)}")
    if by is not None and not _is_path(by):
        raise ValueError(f"the maker of hold {id} must be the path of a node, got {shown(by)}")
    if until is not None and unix_time(until) is None:
        raise ValueError(f"the end of hold {id} must be a Unix time, got {shown(until)}")
    why, who = (text if isinstance(text := value.get(key), str) else "" for key in ("why", "who"))
    at = unix_time(value.get("at")) or 0.0
    return Hold(id, queues, why[:MAX_REASON_CHARACTERS], who[:200], at, unix_time(until), by or "")


def _is_path(value: Any) -> bool:
    return (
        isinstance(value, str)
        and len(value) < 1000
        and value.startswith("/")
        and all(map(is_path_part, value[1:].split("/")))
    )


def held_queues(holds: Iterable[Hold]) -> Callable[[str], bool] | None:
    """Return a predicate that tells whether a queue is held; None if none is."""
    globs = tuple(dict.fromkeys(glob for hold in holds for glob in hold.queues))
    return QueueFilter(globs).matcher() if globs else None


def holds_of(queue: str, holds: Iterable[Hold]) -> tuple[Hold, ...]:
    """Return the holds that match a queue."""
    return tuple(hold for hold in holds if QueueFilter(hold.queues).takes(queue))
