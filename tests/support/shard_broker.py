"""A broker in memory whose queues come and go, and may be split and merged."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.memory_broker import MemoryBroker


class ShardBroker(MemoryBroker):
    """Queues that the test names; their messages are nobody's business here.

    :ivar names: the queues it lists.
    :ivar descent: parents of those that have any.
    :ivar open_ones: those that get messages whatever their nodes say.
    :ivar asked: how often the parents of a queue were asked for.
    """

    list_seconds = 10.0
    vanish_misses = 3
    finished_text = "SHARD_END"

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = list(names)
        self.descent: dict[str, tuple[str, ...]] = {}
        self.open_ones: set[str] = set()
        self.asked: list[str] = []

    def queues(self) -> list[str]:
        self.fail()
        return list(self.names)

    def parents(self, queue: str) -> Sequence[str]:
        self.asked.append(queue)
        return self.descent.get(queue, ())

    def goes_on(self, queue: str) -> bool:
        return queue in self.open_ones

    def add(self, name: str, *parents: str) -> None:
        """List a queue from now on."""
        self.names.append(name)
        self.descent[name] = parents
