"""The engine's state of one owned queue, its prefetched rows, and the worker's counts."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import gevent

from qdo.brokers.base import Reader
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.message import UNKNOWN, Origin
from qdo.system.logs import LogSubject
from qdo.worker.engine.durations import Durations
from qdo.worker.executors.base import AttemptEnded

if TYPE_CHECKING:
    from qdo.brokers.base import Subscription
    from qdo.brokers.dead_letters import DeadLetterRecord
    from qdo.message import Message


_log = logging.getLogger(__name__)

# The reason, in log lines, for the wait of a queue whose broker cannot return messages.
UNREADABLE = "cannot read the queue"


class SlotState(enum.Enum):
    """The state of a slot; see the table in `dispatcher`."""

    IDLE = "idle"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    HELD = "held"
    LIMITED = "limited"
    STILL = "still"
    GONE = "gone"


class TurnResult(enum.Enum):
    """The result of a turn."""

    MORE = "there may be more messages"
    TIP = "a fetch found no message"
    WAIT = "nothing may run before slot.not_before"
    PAUSED = "the lease expired"
    HELD = "nothing more runs under this claim: the queue is blocked, or the worker is stopping"
    LIMITED = "there is no permit"
    STILL = "the queue is paused in the whole fleet"
    ENDED = "the claim is over"


class ClaimReports(Protocol):
    """Receives the reports of a slot; for a queue, a `coordination.member.Member`."""

    name: str
    # Whether the claim is for a pool. A pool records the end of each request separately.
    is_pool: bool

    def progress(self, claim: Claim) -> None: ...

    def finished(self, claim: Claim) -> None: ...

    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool: ...


class LaneGroup(Protocol):
    """The interface of `lanes.Lanes` for a queue's slot and for the limits."""

    claim: Claim
    queue: str
    admitted_at: float
    awaits_permit: bool
    grant: Any

    @property
    def takes_more(self) -> bool: ...

    def turn(self) -> TurnResult: ...

    def wake(self) -> None: ...

    def notify(self) -> None: ...

    def decide(self, decisions: Mapping[int, FailureRecord | None]) -> None: ...

    def stop(self) -> None: ...

    def in_flight(self) -> list[Slot]: ...

    def is_finished(self) -> bool: ...

    def discard(self) -> None: ...


class Slot:
    """The state of one owned queue.

    :ivar claim: the ownership in force; None if the ownership ended while a message was in flight.
    :ivar member: the registration that made `claim`.
    :ivar next_claim: the next claim and its member. The claim begins after the message in flight
      ends.
    :ivar woken: whether a wake came while the queue was running. The worker must then fetch again
      before the queue becomes idle.
    :ivar subscription: the claim's subscription at a polled broker.
    :ivar reader: reads the queue's messages; None before the first fetch and while the queue is
      idle.
    :ivar origin: the origin of the queue's messages, which is known after the first fetch.
    :ivar rows: fetched rows that have not started; the first row follows ``claim.done``.
    :ivar ahead: the next batch, fetched while the turns process `rows`.
    :ivar limit: maximum rows of the next fetch, adapted to the rows that a turn processes.
    :ivar fetched: position of the last fetched row.
    :ivar held_bytes: approximate bytes of the bodies of the rows; see `fetcher`.
    :ivar waited: whether this worker has started the backoff of the message in ``claim.failure``.
    :ivar not_before: clock time before which a waiting slot must not run.
    :ivar alarm: clock time at which `tick` checks a waiting slot; `inf` for never.
    :ivar pending_dead_letter: dead letter to store before the queue continues, with the message
      `dead_letter_message`.
    :ivar lanes: the lanes of a queue that runs in lanes; see `lanes`.
    :ivar gathered: rows for the next batch of a batch job. None without rows, to save memory,
      because thousands of slots may be idle.
    :ivar gathering_until: clock time until which the queue waits for more rows; otherwise 0.
    :ivar singles: number of messages to run one at a time before the next batch.
    :ivar grant: the permits for the start of the next message; see `limits`.
    :ivar label: the encoded names of queue and worker for the in-flight table.
    :ivar in_flight_index: index of the turn's entry in the in-flight table.
    :ivar unreturned: number of this turn's messages whose job did not return. `unstarted` is the
      number of messages whose job did not run. The metrics and `durations` need both.
    :ivar withheld: number of `rows` that the turn may no longer take; see `cancellations`.
    :ivar message: the message in flight; valid while the slot is running.
    :ivar greenlet: the greenlet that runs the turn; `started_at` is the clock time of its start.
    """

    # Whether other messages of the queue may be in flight, or blocked, at the same time.
    in_lane = False

    __slots__ = (
        "ahead",
        "alarm",
        "awaits_permit",
        "broker_failures",
        "claim",
        "dead_letter_message",
        "durations",
        "fetched",
        "gathered",
        "gathering_until",
        "grant",
        "greenlet",
        "held_bytes",
        "in_flight_index",
        "label",
        "lanes",
        "limit",
        "member",
        "message",
        "next_claim",
        "not_before",
        "origin",
        "pending_dead_letter",
        "queue",
        "reader",
        "rows",
        "singles",
        "started_at",
        "state",
        "subscription",
        "unreturned",
        "unstarted",
        "waited",
        "withheld",
        "woken",
    )

    def __init__(self, queue: str, durations: Durations | None = None) -> None:
        self.queue = queue
        self.durations = Durations() if durations is None else durations
        self.state = SlotState.IDLE
        self.claim: Claim | None = None
        self.member: ClaimReports | None = None
        self.next_claim: tuple[ClaimReports, Claim] | None = None
        self.woken = False
        self.subscription: Subscription | None = None
        self.reader: Reader | None = None
        self.origin: Origin = UNKNOWN
        self.rows: Rows | None = None
        self.ahead: Prefetch | None = None
        self.limit = 0
        self.fetched = self.held_bytes = 0
        self.waited = False
        self.broker_failures = 0
        self.not_before = 0.0
        self.alarm = float("inf")  # no alarm is set
        self.pending_dead_letter: DeadLetterRecord | None = None
        self.dead_letter_message: Message | None = None
        self.label = b""
        self.lanes: LaneGroup | None = None
        self.gathered: list[Row] | None = None
        self.gathering_until = 0.0
        self.singles = 0
        self.grant: Any = None
        self.awaits_permit = False
        self.in_flight_index = 0
        self.unreturned = self.unstarted = self.withheld = 0
        self.message: Message | None = None
        self.greenlet: Any = None
        self.started_at = 0.0

    @property
    def takes_more(self) -> bool:
        """Whether the queue can use new messages while it waits."""
        # A queue that gathers a batch checks whether the batch is now full. A queue with lanes runs
        # other messages while some messages wait.
        if self.gathering_until:
            return True
        return self.lanes is not None and self.lanes.takes_more

    @property
    def is_pool(self) -> bool:
        """Whether the slot is for a pool, which has no node and no messages at the broker."""
        return self.member is not None and self.member.is_pool

    @property
    def waits_for_key(self) -> bool:
        """Whether a message with a missing key blocks the queue."""
        failure = None if self.claim is None else self.claim.failure
        return self.state is SlotState.WAITING and failure is not None and failure.blocked

    def __repr__(self) -> str:
        return f"<Slot {self.queue!r} {self.state.value}>"


def where(slot: Slot) -> LogSubject:
    """Return the worker, queue and fence of a slot for a log line."""
    worker = slot.member.name if slot.member is not None else "worker"
    text = f"{worker}, {'pool' if slot.is_pool else 'queue'} {slot.queue}"
    fields: dict[str, object] = {"queue": slot.queue}
    if slot.member is not None:
        fields["worker"] = worker
    if slot.claim is not None:
        fields["fence"] = slot.claim.fence
        text = f"{text}, fence {slot.claim.fence}"
    return LogSubject.of(text, **fields)


def apply_decisions(
    slot: Slot | None, claim: Claim, decisions: Mapping[int, FailureRecord | None]
) -> bool:
    """Apply operators' decisions to running messages.

    If lanes are running, they apply the decisions, and other keys need not wait. Otherwise end the
    attempts of messages to skip or dead-letter. Return whether the lanes apply the decisions.
    """
    if slot is None or slot.state is not SlotState.RUNNING:
        return False
    if slot.lanes is not None and slot.claim is slot.lanes.claim is claim:
        slot.lanes.decide(decisions)
        return True
    identity = claim.positions.identity
    # Lanes of another claim may still finish their messages.
    over = {identity(position) for position, failure in decisions.items() if failure is not None}
    for running in (slot,) if slot.lanes is None else slot.lanes.in_flight():
        if running.message is not None and identity(running.message.position) in over:
            end_attempt(running)
    return False


def end_attempt(slot: Slot) -> None:
    """End the attempt of the message in flight, without waiting for its end.

    The executor ends the attempt as at a deadline. The worker does not interrupt the storing of a
    dead letter.
    """
    if slot.greenlet is None or slot.message is None or slot.pending_dead_letter is not None:
        return
    _log.warning(
        "%s: ending attempt %d of message %s, as an operator decided",
        where(slot),
        slot.message.attempt,
        slot.message.id,
    )
    slot.greenlet.kill(AttemptEnded(), block=False)


@dataclass(slots=True)
class Counters:
    """Counts since the start of the process."""

    # Attempts that have started and ended.
    attempts: int = 0
    # Attempts that did not return: retried, dead-lettered, skipped or blocked. The count includes
    # attempts that were running when the worker lost their queue.
    unsuccessful: int = 0
    retried: int = 0
    dead_lettered: int = 0
    skipped: int = 0
    # Messages that blocked their queue.
    blocked: int = 0
    # Requests of jobs to stop the worker. The attempts of these jobs do not count.
    stopped: int = 0
    # Messages that the broker took back while they were in flight or about to start.
    expired: int = 0
    claimed: int = 0
    released: int = 0
    lost: int = 0
    # Owned queues for which the coordinator lost acknowledged writes.
    undone: int = 0
    # Coordinator sessions that ended before this worker left.
    sessions_lost: int = 0
    # Failures of the broker to return messages or to store a dead letter.
    broker_errors: int = 0

    @property
    def processed(self) -> int:
        """The number of attempts that returned."""
        return self.attempts - self.unsuccessful

    def dump(self) -> dict[str, int]:
        """Return the counts for the component node."""
        own = ("attempts", "unsuccessful", "sessions_lost", "broker_errors")
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "processed": self.processed,
            "failed": self.unsuccessful - self.skipped,
            **{name: count for name, count in counts.items() if name not in own},
        }


# Position, body, key and headers (JSON) of a message.
Row: TypeAlias = tuple[int, bytes, "str | None", "str | None"]
Rows: TypeAlias = Iterator[Row]


class Prefetch:
    """The next batch of a queue. A greenlet fetches it while turns process the previous batch.

    :ivar held_bytes: approximate bytes of the bodies.
    :param on_end: called at the end of the fetch with this object and its rows.
    """

    def __init__(
        self,
        reader: Reader,
        limit: int,
        clock: Callable[[], float],
        held_bytes: int,
        on_end: Callable[[Prefetch, Sequence[Row]], None],
    ) -> None:
        self.held_bytes = held_bytes
        self._on_end = on_end
        self._reader = reader
        self._error: Exception | None = None
        self._rows: Sequence[Row] = ()
        self.took_seconds = 0.0
        self._greenlet = gevent.spawn(self._fetch, limit, clock)

    def _fetch(self, limit: int, clock: Callable[[], float]) -> None:
        start = clock()
        try:
            self._rows = self._reader.fetch(limit)
        except Exception as error:  # noqa: BLE001 - raised in `get`
            self._error = error
        self.took_seconds = clock() - start
        # Call `on_end` even after an error, because the reserved bytes are free without rows.
        self._on_end(self, self._rows)

    def get(self) -> Sequence[Row]:
        """Wait for the rows and return them; raise an error of the broker."""
        self._greenlet.join()
        if self._error is not None:
            raise self._error
        return self._rows
