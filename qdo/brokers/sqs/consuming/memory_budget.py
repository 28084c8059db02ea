"""The bytes of bodies that the owners of one process hold, and how many messages to receive."""

from __future__ import annotations

from collections.abc import Sequence

from qdo.brokers.sqs.codec import Received

HELD_BYTES = 256 * 1024 * 1024
"""About how many bytes one process holds before its queues receive fewer messages at once."""
FIRST_BYTES = 262144.0
"""Assumed size of a message before any was received. It is large: the first polls of all queues are
open at once, and receiving few messages costs each queue only one request."""


class MemoryBudget:
    """The memory of one process for held messages and for messages that open polls may return.

    A queue receives any number of messages while the budget allows. After that it receives only
    the rest of its share, which is the same for each queue.

    :param most: see `HELD_BYTES`.
    :ivar held: bytes of messages that are held or expected.
    :ivar queues: number of queues that share it.
    """

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self._typical = FIRST_BYTES
        self.held = 0
        self.queues = 0

    @property
    def typical(self) -> float:
        """The mean message size of the last answer with messages, of any queue."""
        return self._typical

    def learn(self, messages: Sequence[Received]) -> float:
        """Return the mean message size of an answer that has messages."""
        self._typical = sum(len(each.body) for each in messages) / len(messages)
        return self._typical

    def room(self, size: float, has: int) -> int:
        """Return how many messages a queue may receive; 0: it should wait for a while.

        :param size: approximate size of each.
        :param has: number of messages that it holds already.
        """
        size = max(1.0, size)
        free = int((self._most - self.held) / size)
        missing = int(self._most / max(1, self.queues) / size) - has
        # A queue that holds nothing continues, however small its share is.
        return max(free, missing, 0 if has else 1)

    def took(self, size: int) -> None:
        """Count bytes as held or expected."""
        self.held += size

    def freed(self, size: int) -> None:
        """Stop counting bytes."""
        self.held -= size
