"""Ids of receives: a new one for each, except after a lost answer."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from qdo.brokers.subscription import OPEN_POLL, ReceiptHandleStore

KNOWN_SECONDS = 240.0
"""SQS knows the id of a receive for 300 seconds."""


class ReceiveAttemptId:
    """The ReceiveRequestAttemptIds of one queue.

    SQS may have executed a receive without an answer, and locked message groups for it. With the
    same id it returns the same messages again; with a new one, after their visibility timeout. A
    repeated receive keeps all its parameters.
    """

    def __init__(self) -> None:
        self._id = ""
        self._most = 0
        self._since = 0.0

    def next(self, now: float) -> str:
        """Return the id of the receive that is made now (clock time)."""
        if not self._id or now - self._since > KNOWN_SECONDS:
            self._id, self._most, self._since = str(uuid.uuid4()), 0, now
        return self._id

    def batch_size(self, wanted: int) -> int:
        """Return how many messages the receive requests: as many as its first attempt."""
        self._most = self._most or wanted
        return self._most

    @property
    def unanswered(self) -> bool:
        """Whether a receive has no answer yet."""
        return bool(self._id)

    def answered(self) -> None:
        """Use a new id next: SQS has answered, maybe with an error."""
        self._id = ""


class OpenPoll:
    """Records the open poll of a queue beside the receipts of held messages.

    Released messages may go to an open poll, also to that of a dead process. Its id then returns
    these messages.
    """

    def __init__(self, queue: str, receipts: ReceiptHandleStore | None) -> None:
        self._queue = queue
        self._receipts = receipts
        self._places: list[int] = []

    def opened(self, attempt: str | None) -> None:
        """Record that a poll begins, or that its answer is stored (None)."""
        self._record(() if attempt is None else (OPEN_POLL + attempt,))

    def answered(self, receipts: Iterable[str]) -> None:
        """Record the receipts of an answer whose bodies are still to be read.

        Once its messages are hidden again, the poll's id does not return them any more.
        """
        self._record(receipts)

    def _record(self, entries: Iterable[str]) -> None:
        if self._receipts is not None:
            before = self._places
            self._places = [self._receipts.keep(self._queue, entry) for entry in entries]
            for place in before:
                self._receipts.drop(place)
