"""One owned queue as the worker engine keeps it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from qdo.brokers.base import DeadLetterRecord, Reader
    from qdo.coordination.slots import Claim
    from qdo.message import Message
    from qdo.worker.fetching import Ahead, Rows


class State(enum.Enum):
    """Where a slot stands; see the table in `dispatcher`."""

    IDLE = "idle"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    GONE = "gone"


class Turn(enum.Enum):
    """How a turn ended."""

    MORE = "there may be more messages"
    TIP = "a fetch found none"
    WAIT = "not before slot.not_before"
    PAUSED = "the lease has run out"
    ENDED = "the claim is closed"


class Registration(Protocol):
    """What a slot says to the member that made its claim; see `coordination.member.Member`."""

    name: str

    def progress(self, claim: Claim) -> None: ...

    def finished(self, claim: Claim) -> None: ...

    def record(self, claim: Claim) -> bool: ...


class Slot:
    """One owned queue.

    :ivar claim: the ownership in force, None once it ended while a message is in hand.
    :ivar member: the registration that made `claim`.
    :ivar successor: the claim, and its member, that begins when the message in hand has ended.
    :ivar woken: a wake came while it was running: look again before going idle.
    :ivar reader: reads its messages from the broker; None while there is nothing to read.
    :ivar rows: fetched rows that were not started; the first one comes after ``claim.done``.
    :ivar ahead: the next batch, being fetched while `rows` are processed.
    :ivar limit: rows of the next fetch; follows what a turn gets through.
    :ivar failures: failed attempts of the message after ``claim.done``.
    :ivar troubles: failures of the broker in a row.
    :ivar not_before: clock time before which a waiting slot stays away.
    :ivar letter: dead letter that must be stored before anything else is done.
    :ivar message: the message in hand; valid while running.
    :ivar greenlet: what runs the turn, and `started_at` since when (clock time).
    """

    __slots__ = (
        "ahead",
        "claim",
        "failures",
        "greenlet",
        "letter",
        "limit",
        "member",
        "message",
        "not_before",
        "queue",
        "reader",
        "rows",
        "started_at",
        "state",
        "successor",
        "troubles",
        "woken",
    )

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.state = State.IDLE
        self.claim: Claim | None = None
        self.member: Registration | None = None
        self.successor: tuple[Registration, Claim] | None = None
        self.woken = False
        self.reader: Reader | None = None
        self.rows: Rows | None = None
        self.ahead: Ahead | None = None
        self.limit = 0
        self.failures = 0
        self.troubles = 0
        self.not_before = 0.0
        self.letter: DeadLetterRecord | None = None
        self.message: Message | None = None
        self.greenlet: Any = None
        self.started_at = 0.0

    def __repr__(self) -> str:
        return f"<Slot {self.queue!r} {self.state.value}>"


class JobAborted(BaseException):
    """Ends a job that the worker cannot wait for; no failure of its message."""
