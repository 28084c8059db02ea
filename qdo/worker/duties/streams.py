"""Open the hidden shards of streams whose parents are done, as a step of the leader's discovery.

This step depends only on values that grow: the end of a sealed parent, and the recorded `last`. So
an outdated value may delay a shard, but never opens a shard too early. Two workers may do this step
at once without harm, even if one is a deposed leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from qdo.brokers.streams import StreamStore, are_done
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.text import join_some

_log = logging.getLogger(__name__)

# Seconds between two checks of the parents of hidden shards.
OPEN_SECONDS = 0.5


class ShardOpener:
    """Opens hidden shards.

    :ivar hidden: the shards that remained hidden at the last check.
    """

    def __init__(self, streams: StreamStore) -> None:
        self._streams = streams
        self.hidden: frozenset[str] = frozenset()

    def step(self, read: Callable[[Sequence[str]], Mapping[str, QueueNode]]) -> set[str]:
        """Check the hidden shards once; return the opened shards. `read` returns queue nodes."""
        shards = self._streams.resharded()
        waiting = [each for each in shards if each.hidden]
        if not waiting:
            self.hidden = frozenset()
            return set()
        nodes = read(sorted({name for each in waiting for name in each.parents}))
        # The children of a queue with a damaged node wait, because its `last` is unknown.
        last = {name: node.last for name, node in nodes.items() if node.fault is None}
        by_name = {each.queue: each for each in shards}
        opened = {each.queue for each in waiting if are_done(each, by_name, last)}
        if opened:
            self._streams.open(opened)
            _log.info("shards %s begin: their parents are done", join_some(sorted(opened)))
        self.hidden = frozenset(each.queue for each in waiting) - opened
        return opened
