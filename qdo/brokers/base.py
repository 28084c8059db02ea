"""The interface of every broker: capabilities, readers, subscriptions, delayed messages.

There are two families of brokers: logs (resume at a position) and mailboxes (acknowledge by
deleting). To the engine a mailbox is a log as well: of the messages that it received and holds,
in the order of receipt. `Subscription` is the rest of a mailbox's interface, and that of every
broker that must be polled.

Recorded positions that lie in the future were written by another program. A worker that believed
them would pass over the messages that are sent until then.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from qdo.brokers.catalog import QueueCatalog
from qdo.brokers.dead_letters import DeadLetterStore
from qdo.brokers.outgoing import DEDUP_SECONDS as DEDUP_SECONDS
from qdo.brokers.outgoing import LASTING_DEDUP_SECONDS as LASTING_DEDUP_SECONDS
from qdo.brokers.outgoing import Outgoing as Outgoing
from qdo.brokers.outgoing import SendOptions as SendOptions
from qdo.brokers.request_store import RequestStore
from qdo.brokers.streams import StreamStore
from qdo.encoding import MAX_STORED_BODY_BYTES
from qdo.errors import PositionAheadError, UnsupportedError
from qdo.positions import TIME_POSITIONS, Positions, format_position, position_now

if TYPE_CHECKING:
    from qdo.coordination.znodes.queue_node import FailureRecord

# Prefix of the id of an open poll, which is kept beside the receipts of held messages.
OPEN_POLL = "poll "
# Remedies that errors name, for callers of `App.send` and of ``qdo send``.
REFERENCE = "store it elsewhere and send a reference"
NO_DELAY = "send without delay_seconds and at (--delay, --at)"
NO_DEDUP = "send without dedup_key (--dedup-key)"


class ReceiptHandleStore(Protocol):
    """Keeps receipts of held messages; see `qdo.worker.shared_memory`."""

    def keep(self, queue: str, receipt: str) -> int: ...

    def drop(self, place: int) -> None: ...


class Reader(Protocol):
    """Reads one queue for its owner, in order, from a position on."""

    def fetch(self, limit: int) -> Sequence[tuple[int, bytes, str | None, str | None]]:
        """Return the next rows, at most `limit`, none when the queue is at its tip."""


class Subscription(abc.ABC):
    """The messages of a queue whose broker must be polled, for the owner of the queue.

    It lasts as long as the claim: opened when that begins, closed when none of its jobs still runs.
    No method waits for the broker: greenlets of the broker make the calls, and listeners
    (`Broker.listen`) are woken when there are new messages to fetch.

    :ivar end: the position of the end of a queue that receives no more messages, None while there
        may be more. Known once all messages were fetched.
    :ivar fetched_through: a position behind all fetched messages and before all later ones, which
        is worth recording although no message has it; None: no such position. `last` moves with
        it, so that a queue without messages makes progress in time. It rarely changes, because
        each change is a write.
    """

    end: int | None = None
    fetched_through: int | None = None
    # Whether jobs may start: not while the queue is blocked, nor after the end of the lease, when
    # another worker may own the queue. Set by the engine. While it returns False, a mailbox must
    # not receive messages that another owner could have.
    may_start: Callable[[], bool] = staticmethod(lambda: True)
    # Called when `unconfirmed` no longer returns any name; set by the engine, which records it.
    on_confirmed: Callable[[], None] = staticmethod(lambda: None)
    # Returns the positions of the messages whose jobs run; set by the engine.
    in_flight: Callable[[], Collection[int]] = staticmethod(lambda: ())

    @abc.abstractmethod
    def reader(self, after: int) -> Reader:
        """Return a reader of the messages behind a position; `fetch` returns received messages.

        A fetch that leaves no received message starts the next poll; without fetches there are no
        polls. The rows may be an iterator with a `length_hint` that skips messages which were lost
        meanwhile.
        """

    @abc.abstractmethod
    def at_tip(self) -> bool:
        """Return whether the last poll found no more messages."""

    def behind_seconds(self) -> float | None:
        """Return the age of the first message that is not done, 0 at the tip; None: unknown."""
        return None

    def done(self, position: int) -> None:  # noqa: B027 - logs have nothing to acknowledge
        """Acknowledge a message."""

    def done_through(self, position: int) -> None:  # noqa: B027 - as above
        """Acknowledge every fetched message up to a position."""

    def is_held(self, position: int) -> bool:
        """Return whether this owner may still process a fetched message."""
        return True

    def failure(self, position: int) -> FailureRecord | None:
        """Return the failed attempts of a fetched message, if the broker records them."""
        return None

    def has_followers(self) -> bool:
        """Return whether messages follow that the broker returns once the fetched ones are done.

        Then waiting for more messages before a job begins only delays it.
        """
        return False

    def unconfirmed(self) -> tuple[str, ...]:
        """Return the names of done messages that may still be received again.

        The queue node records them: a later owner acknowledges them without processing them.
        """
        return ()

    def poll_now(self) -> None:  # noqa: B027 - most poll often
        """Poll at once, not after a pause: a sender sent to this queue."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop polling and release the messages that are not done; returns at once."""


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that is not due yet, or that no listener has moved into its queue."""

    # Names it within its broker.
    number: int
    id: str
    # UUIDv1 time.
    due: int
    key: str | None
    # JSON object of str to str, or None.
    headers: str | None
    body: bytes


class DelayedMessages:
    """The delayed messages of a broker that cannot delay any."""

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        """Return delayed messages of a queue, the next due first; with `ids`, only these."""
        return []

    def numbers(self, queue: str) -> list[int]:
        """Return the numbers of all delayed messages of a queue."""
        return []

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        """Delete delayed messages; return the numbers of those that were still delayed.

        A message is either moved into its queue or deleted, never both.
        """
        return set()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a kind of broker; a starting worker rejects jobs that need more."""

    ordered: bool
    seekable: bool
    countable: bool
    delay: bool
    peek: bool
    max_body_bytes: int
    dedup: bool = False
    # The window of all deduplication keys, None: the sender chooses.
    dedup_seconds: float | None = None
    # How long a message can be held at most, None: forever. No job may take longer.
    hold_seconds: float | None = None
    # The remedy for bodies that are larger than `max_body_bytes`.
    larger_bodies: str = REFERENCE
    # Owners must poll for messages: they read through `Broker.subscribe`.
    subscriptions: bool = False
    # Owners poll less often while a queue is empty, so that a sender may notify them.
    doorbell: bool = False
    # Queues differ in the order that `QueueCatalog.order` returns.
    mixed_order: bool = False
    # `QueueCatalog.config_warnings` may return something.
    checks_config: bool = False
    # A queue that this many lists in a row do not have is retired; None: never.
    missing_lists_before_retire: int | None = None
    # `Positions.text` of the end of a closed queue; None: queues have no end.
    end_position_text: str | None = None
    # It stores requests: `Broker.requests` is there.
    requests: bool = False
    # It stores streams: `Broker.streams` is there.
    streams: bool = False
    # How many backlogs a look at all queues reads at most, because each is a call that is paid for
    # or counted; None: all of them.
    backlog_budget: int | None = None

    @property
    def lasting_dedup(self) -> bool:
        """Whether deduplication keys may be valid for `LASTING_DEDUP_SECONDS`."""
        return self.dedup and (self.dedup_seconds or LASTING_DEDUP_SECONDS) >= LASTING_DEDUP_SECONDS


class Row(NamedTuple):
    """One fetched message."""

    # Brokers return plain tuples of this shape where that is faster (a named tuple costs more to
    # make than the message is to fetch).

    position: int
    body: bytes
    key: str | None
    headers: str | None


class _Missing:
    """A store that this kind of broker lacks; a broker that has it sets the attribute."""

    def __init__(self, what: str, remedy: str) -> None:
        self._what = what
        self._remedy = remedy

    def __get__(self, broker: object, kind: type[Broker]) -> Any:
        raise UnsupportedError(broker="this broker", what=self._what, remedy=self._remedy)


class Broker(abc.ABC):
    """A broker: sends, reads and trims messages.

    :ivar dead_letters: the messages that failed for the last time.
    :ivar delayed: the delayed messages, for operators; only with `Capabilities.peek`.
    :ivar id_node: 48-bit node of the UUIDs made from positions (`message.message_id`).
    :ivar identity: random id of a broker that is a file: workers of an app with different files
        would not see each other's messages. "" if workers anywhere reach the same broker.
    :ivar on_sent: a broker with a doorbell calls it with the queues of messages that can be
        received now; it returns at once and raises nothing.
    :ivar max_queues: the most queues that the app may have, None: any number.
    :ivar sets_limit: whether a server that enforces `max_queues` for all processes takes it from
        this one; False for senders and commands, whose settings may be others.
    :ivar max_read_bytes: the largest body to transfer from a server to which other programs send;
        larger ones are unreadable messages, and their dead letters are complete.
    """

    capabilities: Capabilities
    catalog: QueueCatalog
    dead_letters: DeadLetterStore
    id_node: int
    delayed: DelayedMessages = DelayedMessages()
    identity: str = ""
    positions: Positions = TIME_POSITIONS
    on_sent: Callable[[Iterable[str]], None] | None = None
    max_queues: int | None = None
    sets_limit: bool = True
    max_read_bytes: int = MAX_STORED_BODY_BYTES
    # The requests of the app; raises UnsupportedError without `Capabilities.requests`.
    requests: RequestStore = cast(
        Any, _Missing("store requests", "give requests an app with a PostgreSQL broker")
    )
    # The streams of the app; raises UnsupportedError without `Capabilities.streams`.
    streams: StreamStore = cast(
        Any, _Missing("store streams", "use a PostgreSQL broker, or the shards of Kinesis itself")
    )
    # Returns the stream of a shard, and the name of any other queue.
    stream_of: Callable[[str], str] = staticmethod(str)

    @property
    def id_scheme(self) -> int | Positions:
        """The source of the id and time of a `Message`."""
        return self.id_node if self.positions is TIME_POSITIONS else self.positions

    def send(self, message: Outgoing) -> str:
        """Store one message durably and return its id."""
        return self.send_many((message,))[0]

    @abc.abstractmethod
    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages durably, all or none, in the given order; return their ids."""

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Do as `send_many` without blocking the asyncio loop."""
        import asyncio  # slow to import, and most senders do not need it

        return await asyncio.to_thread(self.send_many, messages)

    def send_within(self, connection: Any, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages if, and only if, a transaction of the app commits; return their ids.

        :raises UnsupportedError: this broker is not a database that apps use.
        """
        what = "send in a transaction of the app"
        remedy = "use a qdo.outbox.Outbox in the app's database"
        raise UnsupportedError(broker="this broker", what=what, remedy=remedy)

    @abc.abstractmethod
    def reader(self, queue: str, after: int) -> Reader:
        """Return a reader of the messages behind position `after` (0: all)."""

    @abc.abstractmethod
    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        """Call `wake(queues)` soon after messages for them become readable.

        While a listener is registered, delayed messages become readable when they are due. The
        messages that are already due are readable when this returns.

        A greenlet or thread of the broker calls `wake`, which must not block. A call may name a
        queue without new messages, but never misses a queue with some.

        :return: a function that unregisters the listener.
        """

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        """Begin to poll for the messages of a queue behind `after`, on behalf of its owner.

        Called only where the broker has `Capabilities.subscriptions`.

        :param unconfirmed: as recorded by an earlier owner, see `Subscription.unconfirmed`.
        :param on_lost: called by a greenlet of the broker with the position of a fetched message
            that another owner may receive from now on.
        """
        what = "subscribe to queues"
        remedy = "use reader and listen"
        raise UnsupportedError(broker="this broker", what=what, remedy=remedy)

    def was_away(self, since: float) -> bool:
        """Return whether the broker is away, or was at some time since an attempt began.

        :param since: of `qdo.system.clock`, in seconds. The attempt has failed, perhaps because it
            uses the same server. False for a file, and where only a costly call would tell.
        """
        return False

    def attach_receipt_store(self, receipts: ReceiptHandleStore) -> None:  # noqa: B027 - optional
        """Keep the receipts of held messages in a store; call it before the first `subscribe`."""

    def release(self, held: Sequence[tuple[str, str]]) -> None:  # noqa: B027 - optional
        """Make messages receivable again that a dead process held.

        :param held: queue and receipt of each, where invalid ones are skipped. One that begins with
            `OPEN_POLL` means that the process had a poll open.
        """

    @abc.abstractmethod
    def trim(self, queue: str, last: int, older_than: float) -> int:
        """Delete messages up to `last` sent over `older_than` seconds ago; return their number."""
        # Messages behind `last` are never deleted.

    def delete_queue(self, queue: str, last: int) -> None:
        """Delete a queue that no worker owns, with its messages up to a position.

        :param last: messages up to this position are done, or may be dropped.
        :raises QueueNotEmptyError: it has later or delayed messages, or dead letters.
        :raises UnsupportedError: the queues of this broker are deleted at its service.
        """
        what = "delete queues"
        remedy = "delete the queue at its service, then run this again"
        raise UnsupportedError(broker="this broker", what=what, remedy=remedy)

    def call_counts(self) -> dict[str, int]:
        """Return the number of calls so far, by action; nothing where they are not counted."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Finish pending operations; close files and connections."""


def check_reached(broker: Broker, queue: str, done: int) -> None:
    """Raise PositionAheadError if a queue cannot have been processed up to a position."""
    # A message may have a position in the future, if it was sent by a machine whose clock is ahead:
    # the position is later than now and than every message.
    if _may_be_ahead(broker, done):
        check_head(broker, queue, done, broker.catalog.backlog(queue, 0).head)


def check_head(broker: Broker, queue: str, done: int, head: int) -> None:
    """Check as `check_reached`, given the position of the queue's newest message."""
    time = broker.positions.to_time(done)
    if _may_be_ahead(broker, done) and time > broker.positions.to_time(head):
        raise PositionAheadError(queue=queue, time=format_position(time))


def _may_be_ahead(broker: Broker, done: int) -> bool:
    """Return whether a position is only a time, and later than now."""
    positions = broker.positions
    if not broker.capabilities.seekable or positions.to_text(done) is not None:
        return False
    return positions.to_time(done) > position_now()
