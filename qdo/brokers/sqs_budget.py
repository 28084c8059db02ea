"""How many bytes of bodies the owners of one process hold, and how many messages to ask for."""

from __future__ import annotations

from collections.abc import Sequence

from qdo.brokers.sqs_messages import Received

HELD_BYTES = 256 * 1024 * 1024
"""Bodies that one process holds, about, before its queues ask for fewer messages at once."""
FIRST_BYTES = 4096.0
"""What a message is taken to have before any was received."""


class Budget:
    """The bytes of one process: those of messages that are held, and those that polls may bring.

    It stops nobody: a queue may always ask for one message. So a process holds what the budget
    allows and a few messages of each queue at most, where each queue could have twenty otherwise.

    :param most: see `HELD_BYTES`.
    :ivar held: bytes of messages that are held or expected.
    """

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self._typical = FIRST_BYTES
        self.held = 0

    @property
    def typical(self) -> float:
        """The mean size of the messages of the last answer that had any, of whatever queue."""
        return self._typical

    def learn(self, messages: Sequence[Received]) -> float:
        """Return the mean size of the messages of an answer, one at least."""
        self._typical = sum(len(each.body) for each in messages) / len(messages)
        return self._typical

    def room(self, size: float, most: int) -> int:
        """Return how many messages of a size to ask for, from 1 to `most`."""
        return int(min(most, max(1.0, (self._most - self.held) / max(1.0, size))))

    def took(self, size: int) -> None:
        """Take note of bytes that are held, or that a poll which begins may bring."""
        self.held += size

    def freed(self, size: int) -> None:
        """Take note that they are held, or expected, no more."""
        self.held -= size
