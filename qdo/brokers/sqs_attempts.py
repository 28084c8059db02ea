"""Ids of receives: a new one for each, but for one whose answer got lost."""

from __future__ import annotations

import uuid

KNOWN_SECONDS = 240.0
"""SQS knows the id of a receive for 300 seconds."""


class Attempts:
    """The ReceiveRequestAttemptIds of one queue.

    SQS may have done a receive of which no answer came, and locked message groups for it. With the
    same id it gives the same messages again; with another one they come after their visibility
    time-out. A receive that is made again is the same in all its terms.
    """

    def __init__(self) -> None:
        self._id = ""
        self._most = 0
        self._since = 0.0

    def next(self, now: float) -> str:
        """Return the id of a receive that is made now (clock time)."""
        if not self._id or now - self._since > KNOWN_SECONDS:
            self._id, self._most, self._since = str(uuid.uuid4()), 0, now
        return self._id

    def most(self, wanted: int) -> int:
        """Return how many messages the receive asks for: those wanted when it was made first."""
        self._most = self._most or wanted
        return self._most

    @property
    def open(self) -> bool:
        """Whether a receive was made of which no answer came yet."""
        return bool(self._id)

    def answered(self) -> None:
        """Take note that SQS has answered, be it with an error."""
        self._id = ""
