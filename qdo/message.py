"""Messages as a job sees them, and the UUIDv1 clock behind `last`.

A position is a UUID version 1 timestamp (RFC 4122, section 4.1.4): the number of
100 ns intervals since 1582-10-15, a Python int, printed as a decimal string.
"""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from qdo import headers as known_headers
from qdo.stopping import SIGN

GREGORIAN_OFFSET = 0x01B21DD213814000
"""100 ns intervals between 1582-10-15 and the Unix epoch."""

STOPPING_SHARE = 0.9
"""After this part of its time a job is told that it should stop."""

_NO_HEADERS: Mapping[str, str] = {}


def _clock() -> float:
    """Return the seconds on the clock of `Message.deadline`."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def position_now() -> int:
    """Return the present as a position (100 ns intervals since 1582-10-15)."""
    return time.time_ns() // 100 + GREGORIAN_OFFSET


def position_of_time(seconds: float) -> int:
    """Return the position of a Unix time in seconds."""
    return round(seconds * 10_000_000) + GREGORIAN_OFFSET


def time_of_position(position: int) -> float:
    """Return the Unix time in seconds of a position."""
    return (position - GREGORIAN_OFFSET) / 10_000_000


def format_position(position: int) -> str:
    """Return a position as an ISO 8601 time in UTC with microseconds."""
    moment = datetime.datetime.fromtimestamp(0, datetime.timezone.utc) + datetime.timedelta(
        microseconds=(position - GREGORIAN_OFFSET) // 10
    )
    return moment.isoformat().replace("+00:00", "Z")


def format_last(last: int) -> str | None:
    """Return the time of a recorded `last`, None where it is before the first message.

    1 and 2 are so as well as 0: a seek to the earliest records the one, see `Positions.earliest`,
    and queues that came out of others begin with the other, see `Broker.heir_last`.
    """
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


class Meaning(Protocol):
    """What is asked about positions that are no times; see `qdo.positions.Positions`."""

    @property
    def lasting(self) -> bool: ...
    def last(self, position: int) -> int: ...
    def message_id(self, position: int, node: int) -> str: ...


class Message:
    """One item of a queue, as delivered to a job.

    :ivar queue: name of its queue.
    :ivar body: the decoded JSON value, or bytes where bytes were sent.
    :ivar key: key given by the sender, or None.
    :ivar headers: mapping of str to str, given by the sender.
    :ivar position: grows within a queue; the UUIDv1 time of the message, or what its broker has
        instead (`qdo.positions`).
    :ivar attempt: 1 for the first run of the job for this message.
    :ivar fence: number of the claim this attempt runs under; grows with every claim of
        the queue, so a sink that refuses smaller fences refuses late writes.
    :ivar deadline: time on the worker's clock (CLOCK_BOOTTIME, seconds) by which the job
        must be done, or None.
    """

    __slots__ = (
        "_id",
        "_stop_at",
        "attempt",
        "body",
        "deadline",
        "fence",
        "headers",
        "key",
        "position",
        "queue",
    )

    def __init__(
        self,
        queue: str,
        position: int,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        fence: int = 0,
        attempt: int = 1,
        id: str | int | Meaning = 0,
        deadline: float | None = None,
    ) -> None:
        self.queue = queue
        self.position = position
        self.body = body
        self.key = key
        self.headers = headers
        self.fence = fence
        self.attempt = attempt
        self._id = id
        self.deadline = deadline

    @property
    def id(self) -> str:
        """Unique id, as sending returned it: the broker's own, or the UUIDv1 of the position.

        It stays the same when a delayed message gets its position, and when a dead letter is
        sent again. Made on demand: building a UUID takes longer than the whole rest of a
        message.
        """
        known = self._id
        if isinstance(known, str):
            return known
        named = self.headers.get(known_headers.ID)
        if named:
            return named
        if isinstance(known, int):
            return message_id(self.position, known)
        return known.message_id(self.position, 0)

    @property
    def lasting(self) -> bool:
        """Whether the message has the same `position` when it is delivered again.

        Not with SQS, where a position says when it was received.
        """
        known = self._id
        return isinstance(known, (str, int)) or known.lasting

    def limit(self, seconds: float) -> None:
        """Set the deadline to so many seconds from now; executors do, before the job runs."""
        now = _clock()
        self.deadline = now + seconds
        self._stop_at = now + STOPPING_SHARE * seconds

    @property
    def stopping(self) -> bool:
        """Whether a job should come to an end now, if it can.

        True while the worker drains, and once nine tenths of the job's `timeout_seconds` are
        over. A job that stops early raises, `qdo.Retry` for one: returning means done.
        """
        if SIGN.raised():
            return True
        return self.deadline is not None and _clock() >= getattr(self, "_stop_at", self.deadline)

    @property
    def time(self) -> float:
        """Unix time in seconds at which the message was sent."""
        known = self._id
        if isinstance(known, (str, int)):
            return time_of_position(self.position)
        return time_of_position(known.last(self.position))

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.queue!r}, attempt {self.attempt}>"


class Batch(list[Message]):
    """Messages of one queue in their order, as delivered to a job that takes batches.

    What holds for all of them can be asked of the batch; `id`, `position` and `attempt` are
    those of the first message.
    """

    @property
    def queue(self) -> str:
        """Name of their queue."""
        return self[0].queue

    @property
    def id(self) -> str:
        """Id of the first message."""
        return self[0].id

    @property
    def position(self) -> int:
        """Position of the first message."""
        return self[0].position

    @property
    def attempt(self) -> int:
        """Attempt of the first message: above 1 only where it is alone."""
        return self[0].attempt

    @property
    def fence(self) -> int:
        """Number of the claim under which they are processed."""
        return self[0].fence

    @property
    def deadline(self) -> float | None:
        """Time by which the job must be done with all of them, or None."""
        return self[0].deadline

    @property
    def stopping(self) -> bool:
        """Whether the job should come to an end now, if it can."""
        return self[0].stopping

    @property
    def lasting(self) -> bool:
        """Whether they have the same positions when they are delivered again."""
        return self[0].lasting

    def limit(self, seconds: float) -> None:
        """Set the deadline of all to so many seconds from now."""
        for message in self:
            message.limit(seconds)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} messages{f' of {self.queue!r}' if self else ''}>"
