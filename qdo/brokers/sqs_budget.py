"""How many bytes of bodies the owners of one process hold, and how many messages to ask for."""

from __future__ import annotations

from collections.abc import Sequence

from qdo.brokers.sqs_messages import Received

HELD_BYTES = 256 * 1024 * 1024
"""Bodies that one process holds, about, before its queues ask for fewer messages at once."""
FIRST_BYTES = 262144.0
"""What a message is taken to have before any was received. Much, for the first polls of all queues
are open at once, and asking for few costs each queue one request."""


class Budget:
    """The bytes of one process: those of messages that are held, and those that polls may bring.

    A queue asks for as many messages as it likes while the budget allows, and later for what is
    missing to its share, an equal one for each queue.

    :param most: see `HELD_BYTES`.
    :ivar held: bytes of messages that are held or expected.
    :ivar queues: how many queues there are to share it.
    """

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self._typical = FIRST_BYTES
        self.held = 0
        self.queues = 0

    @property
    def typical(self) -> float:
        """The mean size of the messages of the last answer that had any, of whatever queue."""
        return self._typical

    def learn(self, messages: Sequence[Received]) -> float:
        """Return the mean size of the messages of an answer, one at least."""
        self._typical = sum(len(each.body) for each in messages) / len(messages)
        return self._typical

    def room(self, size: float, has: int) -> int:
        """Return how many messages a queue may ask for; none where it should wait for a while.

        :param size: of each, about.
        :param has: how many it holds already.
        """
        size = max(1.0, size)
        free = int((self._most - self.held) / size)
        missing = int(self._most / max(1, self.queues) / size) - has
        # A queue that holds nothing goes on, however little there is for each.
        return max(free, missing, 0 if has else 1)

    def took(self, size: int) -> None:
        """Take note of bytes that are held, or that a poll which begins may bring."""
        self.held += size

    def freed(self, size: int) -> None:
        """Take note that they are held, or expected, no more."""
        self.held -= size
