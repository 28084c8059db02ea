"""One owned queue as the worker engine keeps it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from qdo.brokers.base import DeadLetterRecord
    from qdo.brokers.subscription import Reader, Subscription
    from qdo.coordination.slots import Claim
    from qdo.message import Message
    from qdo.worker.fetching import Ahead, Row, Rows
    from qdo.worker.lanes import Lanes


class State(enum.Enum):
    """Where a slot stands; see the table in `dispatcher`."""

    IDLE = "idle"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    HELD = "held"
    GONE = "gone"


class Turn(enum.Enum):
    """How a turn ended."""

    MORE = "there may be more messages"
    TIP = "a fetch found none"
    WAIT = "not before slot.not_before"
    PAUSED = "the lease has run out"
    HELD = "nothing more under this claim: its queue is blocked, or the worker is to stop"
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
    :ivar subscription: what the claim has with a broker that must be asked for messages.
    :ivar reader: reads its messages from the broker; None while there is nothing to read.
    :ivar rows: fetched rows that were not started; the first one comes after ``claim.done``.
    :ivar ahead: the next batch, being fetched while `rows` are processed.
    :ivar limit: rows of the next fetch; follows what a turn gets through.
    :ivar waited: the back-off of the message in ``claim.marks`` has begun in this worker.
    :ivar troubles: failures of the broker in a row.
    :ivar not_before: clock time before which a waiting slot stays away.
    :ivar alarm: clock time at which it will be looked at whether it waits, `inf` for never.
    :ivar letter: dead letter that must be stored before anything else is done, and
        `letter_of` the message in it.
    :ivar lanes: the lanes of a queue whose messages need not all wait for each other.
    :ivar gathered: rows taken from `rows` for the next batch of a job that takes batches.
        None where there are none: thousands of slots are idle.
    :ivar gathering_until: clock time up to which it waits for more, 0 while it does not wait.
    :ivar alone: messages to be run one at a time before the next batch.
    :ivar label: the names of queue and worker for `hands`.
    :ivar hand: where the turn keeps word of the message in hand, an index from `hands`.
    :ivar message: the message in hand; valid while running.
    :ivar greenlet: what runs the turn, and `started_at` since when (clock time).
    """

    in_lane = False
    """Whether other messages of the queue may be in hand, and blocked, beside its own."""

    __slots__ = (
        "ahead",
        "alarm",
        "alone",
        "claim",
        "gathered",
        "gathering_until",
        "greenlet",
        "hand",
        "label",
        "lanes",
        "letter",
        "letter_of",
        "limit",
        "member",
        "message",
        "not_before",
        "queue",
        "reader",
        "rows",
        "started_at",
        "state",
        "subscription",
        "successor",
        "troubles",
        "waited",
        "woken",
    )

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.state = State.IDLE
        self.claim: Claim | None = None
        self.member: Registration | None = None
        self.successor: tuple[Registration, Claim] | None = None
        self.woken = False
        self.subscription: Subscription | None = None
        self.reader: Reader | None = None
        self.rows: Rows | None = None
        self.ahead: Ahead | None = None
        self.limit = 0
        self.waited = False
        self.troubles = 0
        self.not_before = 0.0
        self.alarm = float("inf")
        self.letter: DeadLetterRecord | None = None
        self.letter_of: Message | None = None
        self.label = b""
        self.lanes: Lanes | None = None
        self.gathered: list[Row] | None = None
        self.gathering_until = 0.0
        self.alone = 0
        self.hand = 0
        self.message: Message | None = None
        self.greenlet: Any = None
        self.started_at = 0.0

    def __repr__(self) -> str:
        return f"<Slot {self.queue!r} {self.state.value}>"


class JobAborted(BaseException):
    """Ends a job that the worker cannot wait for; no failure of its message."""


class MessageExpired(JobAborted):
    """Ends the job of a message that the broker has taken back; it will be received again."""
