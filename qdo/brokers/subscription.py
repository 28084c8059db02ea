"""What the owner of a queue has with its broker: what it reads, holds and gives back."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

OPEN_POLL = "poll "
"""Begins what is kept beside receipts for a request for messages that is open: its id follows."""


class ReceiptBook(Protocol):
    """Where receipts of held messages are kept; see `qdo.worker.receipts`."""

    def keep(self, queue: str, receipt: str) -> int: ...

    def drop(self, place: int) -> None: ...


class Reader(Protocol):
    """Reads one queue on behalf of its owner, in order, from a position on."""

    def fetch(self, limit: int) -> Sequence[tuple[int, bytes, str | None, str | None]]:
        """Return the next rows, at most `limit`, none when the queue is at its tip."""

    def close(self) -> None:
        """Give up what the reader holds."""


class Subscription(abc.ABC):
    """What the owner of a queue has with a broker that must be asked for messages.

    It lasts as long as the claim: made when that begins, closed when nothing of it runs any more.
    Nothing here waits for the broker: requests are made by greenlets of the broker's own, and
    whoever listens (`Broker.listen`) is woken when there is something new to fetch.

    :ivar end: the position that stands for the end of a queue to which nothing can be added any
        more, None while there may be messages to come. Known once all of them were fetched.
    :ivar reached: a position behind all messages that were fetched and before any to come, where
        it is worth recording although no message has it; None for none. `last` moves with it, so
        that the time of a queue without messages does not stand still. Rarely a new one: each is
        a write.
    """

    end: int | None = None
    reached: int | None = None
    may_start: Callable[[], bool] = staticmethod(lambda: True)
    """Whether jobs may be started: not while the queue is blocked, or the lease is over and the
    queue perhaps another worker's. Said by the engine; a broker from which one owner takes what
    another could have is to leave it there meanwhile."""
    in_hand: Callable[[], Collection[int]] = staticmethod(lambda: ())
    """Positions of the messages whose jobs run; said by the engine."""

    @abc.abstractmethod
    def reader(self, after: int) -> Reader:
        """Return a reader of the messages behind a position; `fetch` gives what is at hand.

        A fetch that leaves nothing at hand lets the broker be asked for more; while nobody
        fetches it is not asked. The rows may be an iterator that tells its `length_hint`, and
        that leaves out messages which were lost meanwhile.
        """

    @abc.abstractmethod
    def at_tip(self) -> bool:
        """Return whether the broker had nothing more when it was last asked."""

    def behind_seconds(self) -> float | None:
        """Return how old the first message is that is not done, 0 at the tip; None: not known."""
        return None

    def done(self, position: int) -> None:  # noqa: B027 - logs have nothing to acknowledge
        """Take note that a message is done: acknowledge it."""

    def done_through(self, position: int) -> None:  # noqa: B027 - as above
        """Take note that every message that was fetched up to a position is done."""

    def is_held(self, position: int) -> bool:
        """Return whether a message that was fetched is still this owner's to run."""
        return True

    def unconfirmed(self) -> tuple[str, ...]:
        """Return names of messages that are done, and may be received again nevertheless.

        They stand in the queue node: a later owner acknowledges them without running them.
        """
        return ()

    def ring(self) -> None:  # noqa: B027 - most need not be told
        """Take note that somebody sent to this queue: ask the broker now, not after a pause."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ask for nothing more, and give back what is held and not done; returns at once."""
