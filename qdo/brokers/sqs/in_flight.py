"""The in-flight messages of an SQS queue: received, hidden, and not yet deleted.

==========  ==============================================================  ==================
a message   meaning                                                         next
is
==========  ==============================================================  ==================
held        received; its job has not ended                                 done, lost,
                                                                            (released)
done        its job has ended; it must be deleted                           (confirmed)
lost        another owner may have received it                              (received again)
==========  ==============================================================  ==================

The classes do no I/O, but take SQS's responses, and return rows and messages to extend.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.base import ReceiptHandleStore, Row
from qdo.brokers.sqs.codec import SQS_POSITIONS, Received, make_position
from qdo.brokers.sqs.receive import OpenPoll
from qdo.brokers.sqs.url import BATCH, HOLD_SECONDS

# If a process holds this approximate number of bytes, its queues receive fewer messages.
HELD_BYTES = 256 * 1024 * 1024
# The assumed size of a message before the first receive. This size is large, because the first
# polls of all queues are open at once. If a first poll receives few messages, the queue only needs
# one more call.
FIRST_BYTES = 262144.0
# The longest long poll that SQS allows.
MOST_WAIT_SECONDS = 20.0
# The maximum number of recorded names of done messages, about 20 KB in the queue node.
MOST_UNCONFIRMED = 500
# The owner extends a message after this share of its visibility timeout.
_EXTEND_SHARE = 0.5
# The owner assumes that a response arrives within this share of the visibility timeout. After a
# later response, SQS may reject extensions and deletions of the messages.
_ON_ITS_WAY_SHARE = 0.1


@dataclass(slots=True)
class InFlightMessage:
    """A received message; all times are clock times."""

    position: int
    row: Row
    receipt: str
    group: str | None
    pointer: BodyPointer | None
    # The time until which SQS certainly hides the message.
    until: float
    # The time at which the owner extends the visibility timeout.
    extend_at: float
    # The time beyond which SQS cannot hide the message.
    forever: float
    done: bool = False
    # The place of the receipt in the receipt store, which the parent process reads.
    kept: int = 0
    # Whether the message group probably has more messages. SQS returns the other messages only
    # after the owner has deleted the received messages.
    has_followers: bool = False


class MemoryBudget:
    """The memory of one process for held messages and for messages that open polls may receive.

    :param most: the budget in bytes; see `HELD_BYTES`.
    :ivar held: the size in bytes of held and expected messages.
    :ivar queues: the number of queues that share the budget.
    :ivar typical: the mean message size of the last response with messages, from any queue.
    """

    # Until the budget is used, a queue receives any number of messages. Then the queue receives
    # only the rest of its share. All queues have equal shares.

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self.typical = FIRST_BYTES
        self.held = 0
        self.queues = 0

    def learn(self, messages: Sequence[Received]) -> float:
        self.typical = sum(len(each.body) for each in messages) / len(messages)
        return self.typical

    def room(self, size: float, has: int) -> int:
        """Return how many messages of about `size` a queue that holds `has` may receive."""
        size = max(1.0, size)
        free = int((self._most - self.held) / size)
        missing = int(self._most / max(1, self.queues) / size) - has
        # A queue without held messages may always receive one message, even with a small share.
        return max(free, missing, 0 if has else 1)

    def took(self, size: int) -> None:
        self.held += size

    def freed(self, size: int) -> None:
        self.held -= size


@dataclass(slots=True)
class ReceiveResult:
    """The messages of a response to ReceiveMessage."""

    # The number of new messages.
    fresh: int = 0
    # The messages that were done before. The owner deletes such messages without processing them.
    again: list[InFlightMessage] = field(default_factory=list)


class Extensions:
    """Decides when to extend the visibility timeouts of held messages."""

    def __init__(self, held: Mapping[int, InFlightMessage], visibility_seconds: float) -> None:
        self._held = held
        self._visibility = visibility_seconds

    def hide(self, held: InFlightMessage, until: float) -> None:
        """Record that SQS hides a message until a clock time."""
        held.until = until
        held.extend_at = until - (1 - _EXTEND_SHARE) * self._visibility
        if held.extend_at + self._visibility > held.forever:
            held.extend_at = until  # SQS would reject an extension

    def extended(self, held: InFlightMessage, asked_at: float) -> None:
        self.hide(held, asked_at + self._visibility)

    def next_at(self) -> float:
        """Return the clock time of the next extension; `inf` if there is none."""
        return min((held.extend_at for held in self._held.values()), default=float("inf"))

    def due(self, now: float) -> tuple[list[InFlightMessage], list[InFlightMessage]]:
        """Return the messages to extend now, and the messages that are no longer hidden."""
        # Include the messages that are due soon, to save calls.
        soon = now + 0.1 * self._visibility
        due = []
        over = []
        for held in self._held.values():
            if held.until <= now:
                over.append(held)
            elif held.extend_at <= soon:
                if now + self._visibility <= held.forever:
                    due.append(held)
                else:
                    held.extend_at = held.until  # too late for an extension
        return due, over


class InFlightMessages:
    """The messages of one queue that its owner holds, in the order of receipt.

    :param after: a position before the positions of all messages of this owner.
    :param unconfirmed: the names of done messages that an earlier owner recorded.
    :param visibility_seconds: the time for which a receive or an extension hides a message.
    """

    def __init__(
        self,
        after: int,
        unconfirmed: Iterable[str],
        visibility_seconds: float,
        clock: Callable[[], float],
        queue: str = "",
        receipts: ReceiptHandleStore | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._queue = queue
        self._receipts = receipts
        self._budget = MemoryBudget() if budget is None else budget
        self.poll = OpenPoll(queue, receipts)
        self._moment = SQS_POSITIONS.to_time(after)
        self._visibility = visibility_seconds
        self._clock = clock
        self._held: dict[int, InFlightMessage] = {}
        self.extensions = Extensions(self._held, visibility_seconds)
        self._by_name: dict[str, InFlightMessage] = {}
        self._order: list[int] = []
        self._unconfirmed = dict.fromkeys(unconfirmed, clock() + HOLD_SECONDS)
        self._proof_from = 0.0
        self.in_doubt()

    def __len__(self) -> int:
        """Return the number of messages that are held and not done."""
        return len(self._order)

    def take(self, messages: Sequence[Received], asked_at: float) -> ReceiveResult:
        """Store the messages that SQS returned; the receive began at `asked_at`."""
        # SQS hid the messages at `asked_at` or later. A long poll may take longer than the
        # visibility timeout.
        until = max(asked_at, self._clock() - _ON_ITS_WAY_SHARE * self._visibility)
        until += self._visibility
        taken = ReceiveResult()
        followed = _is_full_group(messages)
        for message in messages:
            name = name_of(message.message_id)
            known = self._by_name.get(name)
            if known is not None:
                # The visibility timeout ended, and this owner received the message again. So no
                # other owner has the message.
                known.receipt = message.receipt
                self._keep(known)
                self.extensions.hide(known, until)
                if known.done:
                    taken.again.append(known)
            elif name in self._unconfirmed:
                taken.again.append(self._made(message, name, until, done=True))
            else:
                held = self._made(message, name, until)
                held.has_followers = followed
                insort(self._order, held.position)
                taken.fresh += 1
        return taken

    def nothing_came(self, asked_at: float) -> None:
        """Handle an empty response, which may prove that SQS has deleted the done messages."""
        # The response proves this if this owner holds no messages, and if no earlier call can still
        # hide messages.
        if asked_at >= self._proof_from and not self._held:
            self._unconfirmed.clear()

    def in_doubt(self) -> None:
        """Assume that SQS hides messages that this owner does not hold."""
        # A call with a lost response, or an earlier owner, may have received messages.
        self._proof_from = self._clock() + MOST_WAIT_SECONDS + 2 * self._visibility

    def _made(
        self, message: Received, name: str, until: float, done: bool = False
    ) -> InFlightMessage:
        self._moment = max(self._moment + 1, message.sent)
        position = make_position(self._moment, message.sequence, message.message_id)
        row = Row(position, message.body, message.key, message.headers)
        held = InFlightMessage(
            position,
            row,
            message.receipt,
            message.group,
            message.pointer,
            until,
            until,
            until - self._visibility + HOLD_SECONDS,
            done,
        )
        self.extensions.hide(held, until)
        self._held[position] = self._by_name[name] = held
        self._budget.took(len(row.body))
        self._keep(held)
        return held

    def _keep(self, held: InFlightMessage) -> None:
        if self._receipts is not None:
            self._receipts.drop(held.kept)
            held.kept = self._receipts.keep(self._queue, held.receipt)

    def lost(self, held: InFlightMessage) -> list[InFlightMessage]:
        """Drop a message that another owner may have received; return the dropped messages."""
        # Also drop the later messages of the message group, because they must not run before the
        # lost message. The lost message comes first in the result.
        gone = [held]
        if held.group is not None:
            start = bisect_right(self._order, held.position)
            others = (self._held[position] for position in self._order[start:])
            gone += [each for each in others if each.group == held.group]
        for each in gone:
            self._forget(each)
        return gone

    def confirmed(self, held: InFlightMessage) -> None:
        self._forget(held)
        self._unconfirmed.pop(_name(held), None)

    def undeletable(self, held: InFlightMessage) -> None:
        """Drop a done message with an invalid receipt; the next receive recognizes the message."""
        self._forget(held)
        self.in_doubt()

    def released(self, held: InFlightMessage) -> None:
        self._forget(held)

    def _forget(self, held: InFlightMessage) -> None:
        if self._receipts is not None:
            self._receipts.drop(held.kept)
            held.kept = 0
        if self._held.pop(held.position, None) is not None:
            self._budget.freed(len(held.row.body))
        self._by_name.pop(_name(held), None)
        at = bisect_left(self._order, held.position)
        if at < len(self._order) and self._order[at] == held.position:
            del self._order[at]

    def rows(self, after: int, limit: int) -> list[Row]:
        start = bisect_right(self._order, after)
        return [self._held[position].row for position in self._order[start : start + limit]]

    def has_rows(self, after: int) -> bool:
        return bool(self._order) and self._order[-1] > after

    def oldest_sent(self) -> int | None:
        """Return the UUIDv1 send time of the first unfinished message; None if there is none."""
        return SQS_POSITIONS.to_time(self._order[0]) if self._order else None

    def is_held(self, position: int) -> bool:
        """Return whether a message is still held, or done but not deleted."""
        return position in self._held

    def done(self, position: int) -> InFlightMessage | None:
        """Mark a message done; return the message, or None if it is not held or already done."""
        held = self._held.get(position)
        if held is None or held.done:
            return None
        held.done = True
        self._unconfirmed[_name(held)] = self._clock() + HOLD_SECONDS
        at = bisect_left(self._order, position)
        del self._order[at]
        return held

    def done_through(self, position: int) -> list[InFlightMessage]:
        """Mark all messages up to a position done; return the messages that changed."""
        upto = self._order[: bisect_right(self._order, position)]
        return [held for each in upto if (held := self.done(each)) is not None]

    def unconfirmed(self) -> tuple[str, ...]:
        """Return the names of done messages that SQS may not have deleted."""
        if not self._unconfirmed:
            return ()
        now = self._clock()
        for name in [name for name, until in self._unconfirmed.items() if until <= now]:
            del self._unconfirmed[name]
        return tuple(self._unconfirmed)[-MOST_UNCONFIRMED:]

    def undone(self) -> list[InFlightMessage]:
        return [self._held[position] for position in self._order]


def _is_full_group(messages: Sequence[Received]) -> bool:
    """Return whether a response has the maximum number of messages, all of one FIFO group."""
    if len(messages) < BATCH or not messages[0].sequence:
        return False
    return len({each.group for each in messages}) == 1


def name_of(message_id: int) -> str:
    """Return the name of a message, which is the same for every receive of the message."""
    # The name is the MessageId. A SequenceNumber is unique only within a group, and only until the
    # queue is recreated.
    return str(uuid.UUID(int=message_id))


def _name(held: InFlightMessage) -> str:
    return name_of(SQS_POSITIONS.identity(held.position) & ((1 << 128) - 1))
