"""Where messages live in a simulated world."""

from __future__ import annotations

from bisect import bisect_right


class SimulatedBroker:
    """Where messages live: positions in rising order, for each queue.

    :ivar tempo: how many seconds a message takes at most, usually.
    """

    def __init__(self) -> None:
        self.tempo = 0.1
        self.messages: dict[str, list[int]] = {}

    def send(self, queue: str, count: int) -> None:
        """Add messages to a queue."""
        messages = self.messages.setdefault(queue, [])
        start = messages[-1] if messages else 0
        messages.extend(range(start + 10, start + 10 * count + 1, 10))

    def next(self, queue: str, position: int) -> int | None:
        """Return the position of the first message after one."""
        messages = self.messages.get(queue)
        if not messages or messages[-1] <= position:
            return None
        return messages[bisect_right(messages, position)]

    def end(self, queue: str) -> int:
        """Return the position of the newest message, 0 without any."""
        messages = self.messages.get(queue)
        return messages[-1] if messages else 0
