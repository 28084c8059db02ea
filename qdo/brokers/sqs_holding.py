"""What one owner holds of an SQS queue: received, hidden from others, and not yet deleted.

==========  ==============================================================  ==================
a message   meaning                                                         next
is
==========  ==============================================================  ==================
held        received; its job has not ended                                 done, lost, (given
                                                                            back)
done        its job has ended; it is to be deleted                          (confirmed)
lost        SQS may have given it to somebody else                          (received again)
==========  ==============================================================  ==================

No I/O: answers of SQS go in, rows and what is to be asked of SQS come out.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from qdo.brokers.base import Row
from qdo.brokers.sqs_budget import Budget
from qdo.brokers.sqs_messages import Pointer, Received
from qdo.brokers.sqs_positions import SQS_POSITIONS, make_position
from qdo.brokers.subscription import OPEN_POLL, ReceiptBook

HOLD_SECONDS = 12 * 3600.0
"""A message can be hidden for so long from its receipt on, whatever is asked for."""
MOST_WAIT_SECONDS = 20.0
"""A long poll lasts so long at most, whoever asked."""
MOST_UNCONFIRMED = 500
"""Names of done messages that are recorded at most: about 20 KB in the queue node."""
_EXTEND_SHARE = 0.5
"""A message is hidden anew when so much of its visibility time-out is over."""
_ON_ITS_WAY_SHARE = 0.1
"""An answer is taken to arrive within so much of the visibility time-out. Where it took longer,
SQS refuses to extend or to delete what it brought."""


@dataclass(slots=True)
class Held:
    """A message that was received.

    :ivar kept: where its receipt is kept for whoever survives this process.
    :ivar until: clock time up to which SQS hides it for certain.
    :ivar extend_at: clock time at which it should be hidden for longer.
    :ivar forever: clock time beyond which it cannot be hidden.
    """

    position: int
    row: Row
    receipt: str
    group: str | None
    pointer: Pointer | None
    until: float
    extend_at: float
    forever: float
    done: bool = False
    kept: int = 0


@dataclass(slots=True)
class Taken:
    """What came of an answer to ReceiveMessage.

    :ivar fresh: how many messages are new.
    :ivar again: those that were done before: received again to be deleted, not to be run.
    """

    fresh: int = 0
    again: list[Held] = field(default_factory=list)


class Holding:
    """The messages of one queue that its owner holds, in the order of receipt.

    :param after: position after which those of this owner come.
    :param unconfirmed: names of messages that are done, as an earlier owner recorded them.
    :param visibility_seconds: for how long a receipt or an extension hides a message.
    :param receipts: where to keep the receipts of what is held.
    :param budget: told the bytes of what is held.
    """

    def __init__(
        self,
        after: int,
        unconfirmed: Iterable[str],
        visibility_seconds: float,
        clock: Callable[[], float],
        queue: str = "",
        receipts: ReceiptBook | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._queue = queue
        self._receipts = receipts
        self._budget = Budget() if budget is None else budget
        self._poll: list[int] = []
        self._moment = SQS_POSITIONS.last(after)
        self._visibility = visibility_seconds
        self._clock = clock
        self._held: dict[int, Held] = {}
        self._by_name: dict[str, Held] = {}
        self._order: list[int] = []
        self._unconfirmed = dict.fromkeys(unconfirmed, clock() + HOLD_SECONDS)
        self._proof_from = 0.0
        self.in_doubt()

    def __len__(self) -> int:
        """Return how many messages are held and not done."""
        return len(self._order)

    # --- what SQS says ------------------------------------------------------------------

    def take(self, messages: Iterable[Received], asked_at: float) -> Taken:
        """Take in the messages of an answer.

        :param asked_at: clock time at which the request was sent: no earlier were they hidden, and
            later where it waited for them, maybe for longer than they are hidden.
        """
        until = max(asked_at, self._clock() - _ON_ITS_WAY_SHARE * self._visibility)
        until += self._visibility
        taken = Taken()
        for message in messages:
            name = name_of(message.message_id)
            known = self._by_name.get(name)
            if known is not None:
                # Its time was over, and SQS gave it again, to us: nobody else has it.
                known.receipt = message.receipt
                self._keep(known)
                self._hide(known, until)
                if known.done:
                    taken.again.append(known)
            elif name in self._unconfirmed:
                taken.again.append(self._made(message, name, until, done=True))
            else:
                insort(self._order, self._made(message, name, until).position)
                taken.fresh += 1
        return taken

    def nothing_came(self, asked_at: float) -> None:
        """Take note of an answer without messages.

        Messages that are done and neither held nor received, although nobody can have hidden
        them for so long, were deleted after all.

        :param asked_at: clock time at which the request was sent.
        """
        if asked_at >= self._proof_from and not self._held:
            self._unconfirmed.clear()

    def in_doubt(self) -> None:
        """Take note that messages may be hidden from now on without being held.

        By a request without an answer, or for an owner before this one.
        """
        self._proof_from = self._clock() + MOST_WAIT_SECONDS + 2 * self._visibility

    def _made(self, message: Received, name: str, until: float, done: bool = False) -> Held:
        self._moment = max(self._moment + 1, message.sent)
        position = make_position(self._moment, message.sequence, message.message_id)
        row = Row(position, message.body, message.key, message.headers)
        held = Held(
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
        self._hide(held, until)
        self._held[position] = self._by_name[name] = held
        self._budget.took(len(row.body))
        self._keep(held)
        return held

    def _keep(self, held: Held) -> None:
        if self._receipts is not None:
            self._receipts.drop(held.kept)
            held.kept = self._receipts.keep(self._queue, held.receipt)

    def polling(self, attempt: str | None) -> None:
        """Take note that a poll begins, or that its answer is taken in (None).

        What is given back while it is open goes to it, be the process that made it alive or dead;
        and by its id what it brought can be had by others.
        """
        self._keep_of_poll(() if attempt is None else (OPEN_POLL + attempt,))

    def came(self, receipts: Iterable[str]) -> None:
        """Take note of what a poll brought that is not taken in yet, for bodies are to be read.

        Once it is hidden anew its poll's id does not lead to it any more.
        """
        self._keep_of_poll(receipts)

    def _keep_of_poll(self, entries: Iterable[str]) -> None:
        if self._receipts is not None:
            before = self._poll
            self._poll = [self._receipts.keep(self._queue, entry) for entry in entries]
            for place in before:
                self._receipts.drop(place)

    def _hide(self, held: Held, until: float) -> None:
        held.until = until
        held.extend_at = until - (1 - _EXTEND_SHARE) * self._visibility
        if held.extend_at + self._visibility > held.forever:
            held.extend_at = until  # SQS would refuse: there is nothing but its end to come

    def extended(self, held: Held, asked_at: float) -> None:
        """Take note that a message is hidden for longer."""
        self._hide(held, asked_at + self._visibility)

    def lost(self, held: Held) -> list[Held]:
        """Take note that SQS may have given a message to somebody else.

        With it go those behind it in its message group, for they must not run before it.

        :return: what is not held any more, the message itself first.
        """
        gone = [held]
        if held.group is not None:
            start = bisect_right(self._order, held.position)
            others = (self._held[position] for position in self._order[start:])
            gone += [each for each in others if each.group == held.group]
        for each in gone:
            self._forget(each)
        return gone

    def confirmed(self, held: Held) -> None:
        """Take note that a message is deleted."""
        self._forget(held)
        self._unconfirmed.pop(_name(held), None)

    def undeletable(self, held: Held) -> None:
        """Take note that a done message cannot be deleted with the receipt at hand.

        It is received again, and recognised.
        """
        self._forget(held)
        self.in_doubt()

    def given_back(self, held: Held) -> None:
        """Take note that SQS is to show a message again, to whoever asks."""
        self._forget(held)

    def _forget(self, held: Held) -> None:
        if self._receipts is not None:
            self._receipts.drop(held.kept)
            held.kept = 0
        if self._held.pop(held.position, None) is not None:
            self._budget.freed(len(held.row.body))
        self._by_name.pop(_name(held), None)
        at = bisect_left(self._order, held.position)
        if at < len(self._order) and self._order[at] == held.position:
            del self._order[at]

    # --- what the engine says and asks --------------------------------------------------

    def rows(self, after: int, limit: int) -> list[Row]:
        """Return the rows behind a position that are not done."""
        start = bisect_right(self._order, after)
        return [self._held[position].row for position in self._order[start : start + limit]]

    def has_rows(self, after: int) -> bool:
        """Return whether there are rows behind a position."""
        return bool(self._order) and self._order[-1] > after

    def oldest_sent(self) -> int | None:
        """Return when the first message was sent that is not done (UUIDv1), None: all are done."""
        return SQS_POSITIONS.last(self._order[0]) if self._order else None

    def is_held(self, position: int) -> bool:
        """Return whether a message is still ours, or done."""
        return position in self._held

    def done(self, position: int) -> Held | None:
        """Take note that a message is done; return it, None if it is not held."""
        held = self._held.get(position)
        if held is None or held.done:
            return None
        held.done = True
        self._unconfirmed[_name(held)] = self._clock() + HOLD_SECONDS
        at = bisect_left(self._order, position)
        del self._order[at]
        return held

    def done_through(self, position: int) -> list[Held]:
        """Take note that everything up to a position is done; return what is so anew."""
        upto = self._order[: bisect_right(self._order, position)]
        return [held for each in upto if (held := self.done(each)) is not None]

    def unconfirmed(self) -> tuple[str, ...]:
        """Return the names of done messages of which it is not certain that they are deleted."""
        if not self._unconfirmed:
            return ()
        now = self._clock()
        for name in [name for name, until in self._unconfirmed.items() if until <= now]:
            del self._unconfirmed[name]
        return tuple(self._unconfirmed)[-MOST_UNCONFIRMED:]

    # --- what is due --------------------------------------------------------------------

    def undone(self) -> list[Held]:
        """Return what is held and not done, in the order of receipt."""
        return [self._held[position] for position in self._order]

    def extend_at(self) -> float:
        """Return the clock time at which messages should be hidden for longer, `inf` for never."""
        return min((held.extend_at for held in self._held.values()), default=float("inf"))

    def to_extend(self, now: float) -> tuple[list[Held], list[Held]]:
        """Return what should be hidden for longer now, and what is not hidden any more.

        A little before its time is soon enough to go with others in one request.
        """
        soon = now + 0.1 * self._visibility
        due, over = [], []
        for held in self._held.values():
            if held.until <= now:
                over.append(held)
            elif held.extend_at <= soon:
                if now + self._visibility <= held.forever:
                    due.append(held)
                else:
                    held.extend_at = held.until  # too late for that: there is its end to come
        return due, over


def name_of(message_id: int) -> str:
    """Return the name of a message that is the same whenever it is received.

    Its MessageId. A SequenceNumber is one message's within its group and within the life of its
    queue only.
    """
    return str(uuid.UUID(int=message_id))


def _name(held: Held) -> str:
    return name_of(SQS_POSITIONS.name(held.position) & ((1 << 128) - 1))
