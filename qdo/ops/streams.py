"""Reads, splits and merges the shards of streams for commands and the dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.catalog import NO_BACKLOG
from qdo.brokers.streams import StreamShard
from qdo.coordination.znodes.queue_node import NEW
from qdo.errors import UnreachableError
from qdo.ops.fleet import Fleet, read_queues


def shard_items(fleet: Fleet, shards: Iterable[StreamShard]) -> list[dict[str, Any]]:
    """Return the items of qdo.streams/1, in the order of their ranges."""
    shards = sorted(shards, key=lambda each: (each.stream, each.low))
    read = read_queues(fleet.client, fleet.layout, [each.queue for each in shards])
    nodes = {each.queue: read.get(each.queue, NEW) for each in shards}
    last = {queue: node.last for queue, node in nodes.items()}
    backlogs = fleet.broker.catalog.backlogs(last)
    items = []
    for each in shards:
        backlog = backlogs.get(each.queue, NO_BACKLOG)
        end = each.end
        # A sealed shard whose `last` has reached its end, or a deleted shard.
        is_over = end is not None and (last[each.queue] >= end or backlog.head < end)
        items.append(
            {
                "shard": each.queue,
                "stream": each.stream,
                "low": each.low,
                "high": each.high,
                "state": "done" if is_over and not each.hidden else each.state,
                "owner": nodes[each.queue].owner or None,
                "backlog": backlog.count,
                "parents": list(each.parents),
            }
        )
    return items


def reshard(broker: Broker, children: Sequence[StreamShard]) -> None:
    """Store child shards with `StreamStore.add`.

    If the answer is lost, read whether the children exist.
    """
    try:
        broker.streams.add(children)
    except UnreachableError:
        found = {each.queue: each.parents for each in broker.streams.shards(children[0].stream)}
        if any(found.get(each.queue) != each.parents for each in children):
            raise


def hidden_parents(broker: Broker | None, names: Iterable[str]) -> dict[str, Sequence[str]]:
    """Return the parents of each hidden shard among these queues."""
    if broker is None or not broker.capabilities.streams:
        return {}
    queues = set(names)
    shards = broker.streams.resharded() if queues else []
    return {each.queue: each.parents for each in shards if each.hidden and each.queue in queues}
