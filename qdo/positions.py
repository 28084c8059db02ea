"""Positions of messages, and their meaning for each broker.

A position is an int that increases in the order in which a broker delivers the messages of a queue
to its owner. The engine only compares positions. The classes here convert them to values in
queue nodes, and to message ids.
"""

from __future__ import annotations

import datetime
import time
import uuid
from typing import Protocol

__all__ = ["format_position", "position_of_time", "time_of_position"]

# Maximum number of digits in a typed position. No broker has more digits, and `int` fails beyond
# 4,300 digits.
MOST_DIGITS = 100
# The number of 100 ns intervals between 1582-10-15 and the Unix epoch.
GREGORIAN_OFFSET = 0x01B21DD213814000
# The Unix time at which the year 10000 begins. Later times have no ISO 8601 form.
LATEST_SECONDS = 253402300800.0
_FIRST_POSITION = GREGORIAN_OFFSET - 621_355_968_000_000_000
# The first and the last time that `datetime` supports.
_LAST_POSITION = GREGORIAN_OFFSET + 2_534_023_007_999_999_999


class Positions:
    """Positions that are UUIDv1 times, as in the embedded broker.

    The base class of other positions.

    :cvar stable: whether a position means the same message to every owner. If not, a message gets a
        new position whenever a worker receives it. Workers then store only `last` and failure
        records by position, and find the failure records again by `identity`.
    """

    stable = True
    # The ``last`` of a queue that an operator moved back to its oldest message.
    earliest = 0

    def resume_after(self, last: int, position: str | None) -> int:
        """Return the position after which an owner resumes.

        :param last: the recorded UUIDv1 time; 0 before the first message.
        :param position: the recorded broker-specific position, or None, for example after an
            operator's seek to a time.
        :raises ValueError: `position` is not a position of this broker.
        """
        return last

    def to_time(self, position: int) -> int:
        """Return the UUIDv1 time to record as ``last`` for a position."""
        return position

    def to_text(self, position: int) -> str | None:
        """Return the text to record as ``position`` in addition to ``last``, or None."""
        return None

    def identity(self, position: int) -> int:
        """Return the part of a position that is the same for every owner of the message."""
        return position

    def not_before(self, position: int, done: int) -> int:
        """Return the position of a message that has not been received yet.

        If positions are unstable, the result is at least `done`, because positions of another owner
        are not comparable. The owner must not drop the failure record of a future message.
        """
        return position

    def message_id(self, position: int, node: int) -> str:
        """Return the id of a message whose headers contain no id."""
        return message_id(position, node)


# The positions of brokers whose positions are times.
TIME_POSITIONS = Positions()


def position_now() -> int:
    """Return the current time as a position (100 ns intervals since 1582-10-15)."""
    return time.time_ns() // 100 + GREGORIAN_OFFSET


def position_of_time(seconds: float) -> int:
    """Return the position of a Unix time in seconds."""
    return round(seconds * 10_000_000) + GREGORIAN_OFFSET


def time_of_position(position: int) -> float:
    """Return the Unix time in seconds of a position."""
    return (position - GREGORIAN_OFFSET) / 10_000_000


def format_position(position: int) -> str:
    """Return a position as an ISO 8601 time in UTC with microseconds, from year 1 to 9999."""
    position = min(max(position, _FIRST_POSITION), _LAST_POSITION)
    moment = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(
        microseconds=(position - GREGORIAN_OFFSET) // 10
    )
    return moment.isoformat().replace("+00:00", "Z")


def format_last(last: int) -> str | None:
    """Return the time of a recorded `last`, or None before the first message."""
    # A seek to the earliest message records 1 (see `Positions.earliest`). A new queue with parents
    # has 2 (see `QueueCatalog.child_start`).
    return format_position(last) if last > 2 else None


def message_id(position: int, node: int) -> str:
    """Return the UUIDv1 of a position, with a 48-bit `node` and clock sequence 0."""
    return (
        f"{position & 0xFFFFFFFF:08x}-{(position >> 32) & 0xFFFF:04x}"
        f"-{((position >> 48) & 0x0FFF) | 0x1000:04x}-8000-{node:012x}"
    )


def new_id() -> str:
    """Return an id for a message that has no position yet."""
    return str(uuid.uuid4())


class IdScheme(Protocol):
    """The part of `Positions` that a message needs for a position that is not a time."""

    @property
    def stable(self) -> bool: ...
    def to_time(self, position: int) -> int: ...
    def message_id(self, position: int, node: int) -> str: ...
