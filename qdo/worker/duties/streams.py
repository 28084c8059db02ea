"""Open the hidden shards of streams whose parents are done: a step of the leader's discovery.

It reads what only grows: the end of a sealed parent, and the recorded `last`. So an old answer
delays a shard and never opens one too early, and it does no harm if two workers do this at once, or
one that led long ago.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from qdo.brokers.streams import StreamStore, are_done
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.text import join_some

_log = logging.getLogger(__name__)

# How often the parents of hidden shards are looked at.
OPEN_SECONDS = 0.5


class NodeReader(Protocol):
    """Reads the nodes of queues; `LeaderQueues` does."""

    def read_queues(self, names: Sequence[str]) -> Mapping[str, QueueNode]: ...


class ShardOpener:
    """Opens hidden shards.

    :ivar hidden: those that remained hidden at the last look.
    """

    def __init__(self, streams: StreamStore) -> None:
        self._streams = streams
        self.hidden: frozenset[str] = frozenset()

    def step(self, nodes: NodeReader) -> set[str]:
        """Look at the hidden shards once; return those that it opened.

        :raises QdoError: broker or coordinator do not answer.
        """
        shards = self._streams.resharded()
        waiting = [each for each in shards if each.hidden]
        opened = set[str]()
        if waiting:
            known = {each.queue: each for each in shards}
            parents = {name for each in waiting for name in each.parents}
            found = nodes.read_queues(sorted(parents))
            last = {name: node.last for name, node in found.items() if node.fault is None}
            opened = {each.queue for each in waiting if are_done(each, known, last)}
        if opened:
            self._streams.open(opened)
            _log.info("shards %s begin: their parents are done", join_some(sorted(opened)))
        self.hidden = frozenset(each.queue for each in waiting) - opened
        return opened
