"""A broker in memory whose queues come and go, and may be split and merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.support.fakes.scripted_broker import ScriptedBroker, ScriptedCatalog


class ShardBroker(ScriptedBroker):
    """Queues that the test names; their messages do not matter here.

    :ivar names: the queues it lists.
    :ivar descent: parents of those that have any.
    :ivar open_ones: queues that get messages, whatever the state of their nodes.
    :ivar asked: how often the parents of a queue were asked for.
    """

    capabilities = replace(
        ScriptedBroker.capabilities, missing_lists_before_retire=3, end_position_text="SHARD_END"
    )

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = list(names)
        self.descent: dict[str, tuple[str, ...]] = {}
        self.open_ones: set[str] = set()
        self.asked: list[str] = []
        self.catalog = ShardCatalog(self)

    def can(self, **changes: Any) -> None:
        """Change some capabilities."""
        self.capabilities = replace(self.capabilities, **changes)

    def add(self, name: str, *parents: str) -> None:
        """List a queue from now on."""
        self.names.append(name)
        self.descent[name] = parents


class ShardCatalog(ScriptedCatalog):
    _broker: ShardBroker

    def names(self) -> list[str]:
        self._broker.fail()
        return list(self._broker.names)

    def parents(self, queue: str) -> Sequence[str]:
        self._broker.asked.append(queue)
        return self._broker.descent.get(queue, ())

    def is_reopened(self, queue: str) -> bool:
        return queue in self._broker.open_ones
