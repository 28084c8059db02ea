"""What every broker offers, and what it must declare.

Two families stand behind this interface: logs (resume at a position) and mailboxes
(acknowledge by deleting). To the engine a mailbox is a log as well: of the messages that were
received and are held, in the order of receipt. What it must be told beside that, and what any
broker needs that has to ask for new messages itself, is in `subscription`.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from qdo.brokers.subscription import Reader, ReceiptBook, Subscription
from qdo.errors import UnsupportedError
from qdo.ordering import Order
from qdo.positions import TIMES, Positions

if TYPE_CHECKING:
    from qdo.policy import Policy

DEDUP_SECONDS = 300.0
"""Window of a deduplication key whose sender does not say another."""


REFERENCE = "store it elsewhere and send a reference"
NO_DELAY = "send without delay_seconds and at (--delay, --at)"
NO_DEDUP = "send without dedup_key (--dedup-key)"
"""Remedies that errors give, for callers of `App.send` and of ``qdo send``."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a broker can do; whatever it cannot is refused at start."""

    ordered: bool
    seekable: bool
    countable: bool
    delay: bool
    peek: bool
    max_body_bytes: int
    dedup: bool = False
    dedup_seconds: float | None = None
    """The window of all deduplication keys, None: the sender chooses."""
    hold_seconds: float | None = None
    """How long a message can be held at most, None for ever: no job may take longer."""
    larger_bodies: str = REFERENCE
    """What to do about bodies that are larger than `max_body_bytes`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """When a message is to be stored, and whether at all.

    :ivar due: Unix time in seconds before which it must not be delivered; None: at once.
    :ivar dedup_key: of the messages of a queue with the same key one is stored, the first;
        sending another gives the id of the first, for `dedup_seconds` from its sending on.
    """

    due: float | None = None
    dedup_key: str | None = None
    dedup_seconds: float = DEDUP_SECONDS


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a broker; `body` is what will be stored."""

    queue: str
    body: bytes
    key: str | None = None
    headers: str | None = None
    """JSON object of str to str, or None."""
    terms: Terms | None = None
    """None for most: one field, because a million of these are made a minute."""


class Row(NamedTuple):
    """One fetched message.

    Brokers return plain tuples of this shape where that is faster (a named tuple costs
    more to make than the message is to fetch).
    """

    position: int
    body: bytes
    key: str | None
    headers: str | None


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """A message set aside with its error after its last attempt."""

    queue: str
    position: int
    body: bytes
    key: str | None
    headers: str | None
    error: str
    traceback: str
    attempts: int
    worker: str
    fence: int
    dead_at: float = field(default=0.0)
    """Unix time in seconds."""


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """A dead letter without its body and traceback, of which there may be very much."""

    queue: str
    position: int
    key: str | None
    headers: str | None
    error: str
    attempts: int
    worker: str
    fence: int
    dead_at: float
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in a queue after a position."""

    count: int
    oldest: int | None
    """Position of the first waiting message, None when there is none."""
    head: int
    """Position of the newest message ever sent, 0 when there was none."""
    delayed: int = 0
    """Messages that are not due yet; they are not in `count`."""
    approximate: bool = False
    """The broker does not know exactly; where it is not `countable`, 1 stands for any number."""
    behind_seconds: float | None = None
    """Age of what is read next, where the broker says it, 0 at the tip."""


class Broker(abc.ABC):
    """Where messages live."""

    capabilities: Capabilities
    id_node: int
    """48-bit node of the UUIDs made from positions (`message.message_id`)."""
    positions: Positions = TIMES
    list_seconds: float = 10.0
    """How often the leading worker compares all queues of the broker with those it knows."""
    vanish_misses: int | None = None
    """A queue that is missing from so many lists in a row is retired; None: never."""
    finished_text: str | None = None
    """`Positions.text` of the end of a queue that gets no messages any more; None: none ends."""
    heir_last: int = 0
    """`last` with which a queue begins that came out of others while the app had queues already."""
    polled: bool = False
    """Owners ask for new messages, ever less often while there are none: a sender may ring."""
    backlog_budget: int | None = None
    """A look at all queues asks for so many backlogs at most, for each is a request that is paid
    for or counted; None: for all of them."""
    on_sent: Callable[[Iterable[str]], None] | None = None
    """Told by a `polled` broker to which queues messages were sent that can be had now; it returns
    at once and raises nothing."""

    @abc.abstractmethod
    def queues(self) -> list[str]:
        """Return the names of all queues."""

    def advice(self, policies: Mapping[str, Policy]) -> Sequence[str]:
        """Return what should be changed about queues at the broker, as sentences with the remedy.

        :param policies: failure policy of each queue.
        :raises: as `queues`.
        """
        return ()

    @abc.abstractmethod
    def send(self, message: Outgoing) -> str:
        """Store one message durably and return its id."""

    @abc.abstractmethod
    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages durably, all or none, in the given order; return their ids."""

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Do as `send_many` without stopping the asyncio loop meanwhile."""
        import asyncio  # takes a while, and most senders do without

        return await asyncio.to_thread(self.send_many, messages)

    @property
    def naming(self) -> int | Positions:
        """What a `Message` makes its id and its time of."""
        return self.id_node if self.positions is TIMES else self.positions

    def order(self, queue: str) -> Order:
        """Return the strictest order in which a queue can be processed.

        :raises: as `queues`.
        """
        return "queue"

    def parents(self, queue: str) -> Sequence[str]:
        """Return the queues that must be done to their end before this one may begin."""
        return ()

    def goes_on(self, queue: str) -> bool:
        """Return whether a queue that was listed last still gets messages, so that it has no end.

        Where a node says that it was done to its end, that was another one of the same name.
        """
        return False

    def has_place(self, queue: str, position: int) -> bool:
        """Return whether a queue has, or had, a message at a position of the broker's own form.

        :raises: as `queues`.
        """
        return True

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription | None:
        """Begin to ask for the messages of a queue behind `after`, on behalf of its owner.

        :param unconfirmed: as recorded by an earlier owner, see `Subscription.unconfirmed`.
        :param on_lost: called with the position of a message that was fetched and is no longer
            this owner's; from a greenlet of the broker.
        :return: None where there is no need: `reader` and `listen` do.
        """
        return None

    def keep_receipts(self, receipts: ReceiptBook) -> None:  # noqa: B027 - most have none
        """Keep there what subscriptions hold, as long as they hold it; before the first one."""

    def give_back(self, held: Sequence[tuple[str, str]]) -> None:  # noqa: B027 - as above
        """Let messages be received again that a dead process held.

        :param held: queue and receipt of each. One that is not held any more is passed over; one
            that begins with `OPEN_POLL` says that the process was asking for messages.
        :raises: as `queues`.
        """

    @abc.abstractmethod
    def reader(self, queue: str, after: int) -> Reader:
        """Return a reader of the messages behind position `after` (0: all)."""

    @abc.abstractmethod
    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        """Call `wake(queues)` soon after messages for them become readable.

        While somebody listens, delayed messages become readable when they are due; those that
        are due already are readable when this returns.

        Called from a greenlet or thread of the broker; `wake` must not block. A name may
        come without need, never the other way round. Returns a function that stops it.
        """

    @abc.abstractmethod
    def backlog(self, queue: str, after: int) -> Backlog:
        """Return what waits behind position `after`."""

    @abc.abstractmethod
    def bury(self, letter: DeadLetterRecord) -> None:
        """Store a dead letter durably; doing it twice for one position stores one."""

    @abc.abstractmethod
    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        """Return the dead letters of a queue, or of all, oldest first."""

    def dead_letter_counts(self) -> Mapping[str, int]:
        """Return how many dead letters each queue has, of those that have any."""
        return Counter(letter.queue for letter in self.dead_letters())

    def find_dead_letters(
        self,
        queue: str | None = None,
        *,
        error: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[DeadLetterEntry]:
        """Return what dead letters of a queue, or of all, are like, oldest first.

        :param error: text that the error holds, upper or lower case.
        :param since: Unix time; only those that died then or later.
        :param until: Unix time; only those that died then or earlier.
        """
        return [
            _entry(letter)
            for letter in self.dead_letters(queue)
            if (error is None or error.casefold() in letter.error.casefold())
            and (since is None or letter.dead_at >= since)
            and (until is None or letter.dead_at <= until)
        ]

    def dead_letter(self, queue: str, position: int) -> DeadLetterRecord | None:
        """Return one dead letter, None when there is no such."""
        found = (each for each in self.dead_letters(queue) if each.position == position)
        return next(found, None)

    def retry_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[int | None]:
        """Put dead letters to the end of their queues, in the given order, all or none.

        Each is stored as a message and removed as a dead letter in one transaction. The
        message keeps its id and says how often it was retried: see `qdo.headers`.

        :param letters: queue and position of each.
        :return: the new position of each, None for one that does not exist (any more).
        """
        raise self._unsupported("send dead letters again")

    def discard_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[bool]:
        """Delete dead letters for good; return for each whether it existed.

        :param letters: queue and position of each.
        """
        raise self._unsupported("discard dead letters")

    def _unsupported(self, what: str) -> UnsupportedError:
        remedy = "do it with the tools of the broker"
        return UnsupportedError(broker="this broker", what=what, remedy=remedy)

    @abc.abstractmethod
    def retire(self, queue: str, last: int, older_than: float) -> int:
        """Delete messages up to `last` that were sent more than `older_than` seconds ago.

        Returns how many. Messages behind `last` are never deleted.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what was begun and let go of files and connections."""


def _entry(letter: DeadLetterRecord) -> DeadLetterEntry:
    return DeadLetterEntry(
        queue=letter.queue,
        position=letter.position,
        key=letter.key,
        headers=letter.headers,
        error=letter.error,
        attempts=letter.attempts,
        worker=letter.worker,
        fence=letter.fence,
        dead_at=letter.dead_at,
        body_bytes=len(letter.body),
    )
