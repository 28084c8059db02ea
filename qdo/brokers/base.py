"""The interface of every broker: capabilities, readers, subscriptions, delayed messages.

There are two families of brokers. A log lets a worker resume at a position; a mailbox lets it
acknowledge by deleting. The engine treats a mailbox as a log of the held messages, in the order of
receipt. `Subscription` is the interface of every broker that a worker must poll, such as a mailbox.

If a recorded position lies in the future, another program wrote it. A worker that trusted a future
position would skip all messages from before that time.
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
from qdo.errors import PositionAheadError, QdoError, UnsupportedError
from qdo.positions import TIME_POSITIONS, Positions, format_position, position_now

if TYPE_CHECKING:
    from qdo.coordination.znodes.queue_node import FailureRecord

# The prefix of an open poll's id. The receipt store keeps the ids of polls with the receipts.
OPEN_POLL = "poll "
# Remedies that errors give to callers of `App.send` and ``qdo send``.
REFERENCE = "store it elsewhere and send a reference"
NO_DELAY = "send without delay_seconds and at (--delay, --at)"
NO_DEDUP = "send without dedup_key (--dedup-key)"


class ReceiptHandleStore(Protocol):
    """Stores the receipts of held messages; see `qdo.worker.shared_memory`."""

    def keep(self, queue: str, receipt: str) -> int: ...

    def drop(self, place: int) -> None: ...


class Reader(Protocol):
    """Reads one queue in order for its owner, beginning after a position."""

    def fetch(self, limit: int) -> Sequence[tuple[int, bytes, str | None, str | None]]:
        """Return the next rows, at most `limit`; an empty sequence at the tip of the queue."""


class Subscription(abc.ABC):
    """Gives the messages of a queue to its owner, if workers must poll the broker.

    The owner opens the subscription when its claim begins, and closes it when the claim's last job
    has ended. No method waits for the broker. Greenlets of the broker make the calls, and wake
    listeners (`Broker.listen`) when there are new messages to fetch.

    :ivar end: the position of the end of a queue that receives no more messages. The value is None
        while messages may still arrive, and until the owner has fetched all messages.
    :ivar fetched_through: a position after all fetched messages and before all later messages. No
        message has this position, but the owner records it as `last`, even in a queue without
        messages. Each change costs a write, so the position rarely changes. The value None means no
        position.
    """

    end: int | None = None
    fetched_through: int | None = None
    # A function that returns whether jobs may start; set by the engine. It returns False while the
    # queue is blocked, and after the lease, when another worker may own the queue. While the result
    # is False, a mailbox must not receive messages that another owner could receive.
    may_start: Callable[[], bool] = staticmethod(lambda: True)
    # The broker calls this function when `unconfirmed` becomes empty. The engine records the
    # change.
    on_confirmed: Callable[[], None] = staticmethod(lambda: None)
    # A function that returns the positions of the messages with running jobs; set by the engine.
    in_flight: Callable[[], Collection[int]] = staticmethod(lambda: ())

    @abc.abstractmethod
    def reader(self, after: int) -> Reader:
        """Return a reader of the messages after a position; its `fetch` returns received messages.

        A fetch that takes the last received message starts the next poll. Without fetches there are
        no polls. The rows may be an iterator with a `length_hint`. The iterator skips messages that
        the owner lost after the fetch.
        """

    @abc.abstractmethod
    def at_tip(self) -> bool:
        """Return whether the last poll found no more messages."""

    def behind_seconds(self) -> float | None:
        """Return the age of the first unfinished message; 0 at the tip, None if it is unknown."""
        return None

    def done(self, position: int) -> None:  # noqa: B027 - logs have nothing to acknowledge
        """Acknowledge a message."""

    def done_through(self, position: int) -> None:  # noqa: B027 - logs have nothing to acknowledge
        """Acknowledge every fetched message up to a position."""

    def is_held(self, position: int) -> bool:
        """Return whether this owner may still process a fetched message."""
        return True

    def failure(self, position: int) -> FailureRecord | None:
        """Return the failed attempts of a fetched message, if the broker records them."""
        return None

    def has_followers(self) -> bool:
        """Return whether the broker has more messages after the fetched messages.

        If the broker has more messages, waiting for them before a job begins only delays the job.
        """
        return False

    def unconfirmed(self) -> tuple[str, ...]:
        """Return the names of done messages that the broker may still deliver again.

        The queue node records the names. A later owner acknowledges these messages without
        processing them.
        """
        return ()

    def poll_now(self) -> None:  # noqa: B027 - most brokers poll often
        """Poll at once, without a pause, because a sender has sent to this queue."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop polling, and release unfinished messages; return at once."""


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that is not due yet, or that is due but not yet in its queue."""

    # The number of the message, which is unique within the broker.
    number: int
    id: str
    # The due time, as a UUIDv1 time.
    due: int
    key: str | None
    # A JSON object of str to str, or None.
    headers: str | None
    body: bytes


class DelayedMessages:
    """The delayed messages and deduplication keys of a broker that does not support them."""

    def find(
        self, queue: str, limit: int, ids: Collection[str] | None = None
    ) -> list[DelayedMessage]:
        """Return a queue's delayed messages, with `ids` only these messages, by due time."""
        return []

    def numbers(self, queue: str) -> list[int]:
        """Return the numbers of all delayed messages of a queue."""
        return []

    def discard(self, queue: str, numbers: Collection[int]) -> set[int]:
        """Delete delayed messages; return the numbers of the deleted messages.

        This method does not delete a message that the broker has already moved into its queue.
        """
        return set()

    def free(self, queue: str, key: str | None, unique: str, id: str) -> None:
        """Free the deduplication key `unique` of a message, whose end is not recorded yet.

        :param key: the key of the message.
        :param id: the id of the message; the key of another message stays.
        """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a kind of broker; a starting worker rejects jobs that need other features."""

    ordered: bool
    seekable: bool
    countable: bool
    delay: bool
    peek: bool
    max_body_bytes: int
    dedup: bool = False
    # The time for which every deduplication key is valid; None: the sender chooses.
    dedup_seconds: float | None = None
    # The maximum time for which an owner can hold a message, and so of a job; None: no limit.
    hold_seconds: float | None = None
    # The remedy for bodies larger than `max_body_bytes`.
    larger_bodies: str = REFERENCE
    # Whether owners must poll for messages, through `Broker.subscribe`.
    subscriptions: bool = False
    # Whether owners poll empty queues less often, and senders should notify them.
    doorbell: bool = False
    # Whether `QueueCatalog.order` differs between queues.
    mixed_order: bool = False
    # Whether `QueueCatalog.config_warnings` may return warnings.
    checks_config: bool = False
    # The leader retires a queue after this number of successive lists without it; None: never.
    missing_lists_before_retire: int | None = None
    # The end of a closed queue, as `Positions.text` returns it; None: queues have no end.
    end_position_text: str | None = None
    # Whether the broker stores requests and has `Broker.requests`.
    requests: bool = False
    # Whether the broker stores streams and has `Broker.streams`.
    streams: bool = False
    # The maximum number of backlogs that a look at all queues reads; None: all backlogs. Each
    # backlog needs a call that the broker bills or limits.
    backlog_budget: int | None = None

    @property
    def lasting_dedup(self) -> bool:
        """Whether deduplication keys can be valid for `LASTING_DEDUP_SECONDS`."""
        return self.dedup and (self.dedup_seconds or LASTING_DEDUP_SECONDS) >= LASTING_DEDUP_SECONDS


class Row(NamedTuple):
    """One fetched message."""

    # Brokers return plain tuples of this shape where speed matters, because making a named tuple
    # takes longer than fetching the message.

    position: int
    body: bytes
    key: str | None
    headers: str | None


class _Missing:
    """A store that this kind of broker lacks; brokers that have the store set the attribute."""

    def __init__(self, what: str, remedy: str) -> None:
        self._what = what
        self._remedy = remedy

    def __get__(self, broker: object, kind: type[Broker]) -> Any:
        raise UnsupportedError(broker="this broker", what=self._what, remedy=self._remedy)


class Broker(abc.ABC):
    """Sends, reads and trims messages.

    :ivar dead_letters: the messages whose last attempt has failed.
    :ivar delayed: the delayed messages, for operators; only with `Capabilities.peek`.
    :ivar id_node: the 48-bit node of the UUIDs that `message.message_id` makes from positions.
    :ivar identity: a random id of a broker that is a file; "" for a server. Workers with different
        files do not see each other's messages, and this id tells the files apart.
    :ivar on_sent: a function that a broker with a doorbell calls with the queues of new messages
        that owners can receive now. The function returns at once and raises no error.
    :ivar on_unusable: a function that the broker calls, on any thread, with the reason why this
        process can no longer use the store until an operator acts. Calls of the broker raise it.
    :ivar max_queues: the maximum number of queues of the app; None: no limit.
    :ivar sets_limit: whether this process sets the `max_queues` that a server enforces for all
        processes. The value is False for senders and commands, because their settings may differ.
    :ivar max_read_bytes: the largest body to transfer from a server that other programs also send
        to. Messages with larger bodies are unreadable, but their dead letters are complete.
    """

    capabilities: Capabilities
    catalog: QueueCatalog
    dead_letters: DeadLetterStore
    id_node: int
    delayed: DelayedMessages = DelayedMessages()
    identity: str = ""
    positions: Positions = TIME_POSITIONS
    on_sent: Callable[[Iterable[str]], None] | None = None
    on_unusable: Callable[[QdoError], None] = staticmethod(lambda error: None)
    max_queues: int | None = None
    sets_limit: bool = True
    max_read_bytes: int = MAX_STORED_BODY_BYTES
    # The requests of the app; the access raises UnsupportedError without `Capabilities.requests`.
    requests: RequestStore = cast(
        Any, _Missing("store requests", "give requests an app with a PostgreSQL broker")
    )
    # The streams of the app; the access raises UnsupportedError without `Capabilities.streams`.
    streams: StreamStore = cast(
        Any, _Missing("store streams", "use a PostgreSQL broker, or the shards of Kinesis itself")
    )
    # Returns the stream of a shard, and the name of any other queue.
    stream_of: Callable[[str], str] = staticmethod(str)

    @property
    def id_scheme(self) -> int | Positions:
        """The object or node that gives a `Message` its id and time."""
        return self.id_node if self.positions is TIME_POSITIONS else self.positions

    def send(self, message: Outgoing) -> str:
        """Store one message durably and return its id."""
        return self.send_many((message,))[0]

    @abc.abstractmethod
    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store all messages durably in the given order, or no messages; return their ids."""

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages like `send_many`, without blocking the asyncio loop."""
        import asyncio  # asyncio is slow to import, and most senders do not use it

        return await asyncio.to_thread(self.send_many, messages)

    def send_within(self, connection: Any, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages if, and only if, the app's transaction commits; return their ids.

        :raises UnsupportedError: this broker is not a database that apps use.
        """
        what = "send in a transaction of the app"
        remedy = "use a qdo.outbox.Outbox in the app's database"
        raise UnsupportedError(broker="this broker", what=what, remedy=remedy)

    @abc.abstractmethod
    def reader(self, queue: str, after: int) -> Reader:
        """Return a reader of the messages after position `after` (0: all messages)."""

    @abc.abstractmethod
    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        """Call `wake(queues)` soon after messages in these queues become readable.

        While a listener is registered, delayed messages become readable when they are due. Messages
        that are already due are readable when this method returns.

        A greenlet or thread of the broker calls `wake`, which must not block. A call may name a
        queue without new messages, but never omits a queue with new messages.

        :return: a function that unregisters the listener.
        """

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        """Begin to poll for the messages of a queue after a position, on behalf of its owner.

        The engine calls this only for brokers with `Capabilities.subscriptions`.

        :param unconfirmed: the names that an earlier owner recorded; see
            `Subscription.unconfirmed`.
        :param on_lost: a function that a greenlet of the broker calls with the position of a
            fetched message when another owner may receive the message.
        """
        what = "subscribe to queues"
        remedy = "use reader and listen"
        raise UnsupportedError(broker="this broker", what=what, remedy=remedy)

    def was_away(self, since: float) -> bool:
        """Return whether the broker is unreachable, or has been unreachable since an attempt began.

        :param since: the start of the failed attempt by `qdo.system.clock`, in seconds. The
            attempt's job may use the same server as the broker. The result is False for a file, and
            for a broker that would need a costly call.
        """
        return False

    def attach_receipt_store(self, receipts: ReceiptHandleStore) -> None:  # noqa: B027 - optional
        """Keep the receipts of held messages in a store; call this before the first `subscribe`."""

    def release(self, held: Sequence[tuple[str, str]]) -> None:  # noqa: B027 - optional
        """Make the messages of a dead process receivable again.

        :param held: the queue and receipt of each message; the broker skips invalid receipts. A
            receipt that begins with `OPEN_POLL` means that the process had an open poll.
        """

    @abc.abstractmethod
    def trim(self, queue: str, last: int, older_than: float) -> int:
        """Delete messages up to `last` older than `older_than` seconds; return their number."""
        # Never delete messages after `last`.

    def delete_queue(self, queue: str, last: int) -> None:
        """Delete a queue that no worker owns, and its messages up to a position.

        :param last: the position up to which all messages are done or disposable.
        :raises QueueNotEmptyError: the queue has later or delayed messages, or dead letters.
        :raises UnsupportedError: operators must delete the queues of this broker at its service.
        """
        what = "delete queues"
        remedy = "delete the queue at its service, then run this again"
        raise UnsupportedError(broker="this broker", what=what, remedy=remedy)

    def call_counts(self) -> dict[str, int]:
        """Return the number of calls so far by action; empty if the broker does not count calls."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Finish pending operations; close files and connections."""


def check_reached(broker: Broker, queue: str, done: int) -> None:
    """Raise PositionAheadError if workers cannot have processed a queue up to a position."""
    # A message may have a position in the future, if the clock of its sender was ahead. So a
    # position is wrong only if it is later than now and later than every message.
    if _may_be_ahead(broker, done):
        check_head(broker, queue, done, broker.catalog.backlog(queue, 0).head)


def check_head(broker: Broker, queue: str, done: int, head: int) -> None:
    """Perform the check of `check_reached`, given the position of the queue's newest message."""
    time = broker.positions.to_time(done)
    if _may_be_ahead(broker, done) and time > broker.positions.to_time(head):
        raise PositionAheadError(queue=queue, time=format_position(time))


def _may_be_ahead(broker: Broker, done: int) -> bool:
    """Return whether a position is only a time, and this time is later than now."""
    positions = broker.positions
    if not broker.capabilities.seekable or positions.to_text(done) is not None:
        return False
    return positions.to_time(done) > position_now()
