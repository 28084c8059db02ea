"""The interface between a queue's owner and its broker: reading, holding, acknowledging."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

OPEN_POLL = "poll "
"""Prefix of the id of an open poll, which is kept beside the receipts of held messages."""


class ReceiptHandleStore(Protocol):
    """Keeps receipts of held messages; see `qdo.worker.shared_memory.receipt_handles`."""

    def keep(self, queue: str, receipt: str) -> int: ...

    def drop(self, place: int) -> None: ...


class Reader(Protocol):
    """Reads one queue for its owner, in order, from a position on."""

    def fetch(self, limit: int) -> Sequence[tuple[int, bytes, str | None, str | None]]:
        """Return the next rows, at most `limit`, none when the queue is at its tip."""

    def close(self) -> None:
        """Release the resources of the reader."""


class Subscription(abc.ABC):
    """The messages of a queue whose broker must be polled, for the owner of the queue.

    It lasts as long as the claim: opened when that begins, closed when no job of it runs any more.
    No method waits for the broker: greenlets of the broker make the requests, and listeners
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
    may_start: Callable[[], bool] = staticmethod(lambda: True)
    """Whether jobs may start: not while the queue is blocked, nor after the end of the lease, when
    another worker may own the queue. Set by the engine. While it returns False, a mailbox must not
    receive messages that another owner could have."""
    in_flight: Callable[[], Collection[int]] = staticmethod(lambda: ())
    """Returns the positions of the messages whose jobs run; set by the engine."""

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
