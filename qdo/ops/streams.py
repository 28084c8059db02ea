"""The shards of streams as commands and the dashboard show them, and their division."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qdo.brokers.base import Broker
from qdo.brokers.catalog import NO_BACKLOG
from qdo.brokers.streams import StreamShard
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.errors import UnreachableError
from qdo.ops.fleet import Fleet


def shard_items(fleet: Fleet, shards: Iterable[StreamShard]) -> list[dict[str, Any]]:
    """Return the items of qdo.streams/1, in the order of their ranges."""
    shards = sorted(shards, key=lambda each: (each.stream, each.low))
    last = dict.fromkeys((each.queue for each in shards), 0)
    owners: dict[str, str] = {}
    paths = [fleet.layout.queue(each.queue) for each in shards]
    for read in read_nodes(fleet.client, paths) if fleet.client is not None else []:
        name = read.path.rpartition("/")[2]
        node = QueueNode.parse(read.data, read.refused)
        last[name] = node.last
        owners[name] = node.owner
    backlogs = fleet.broker.catalog.backlogs(last)
    items = []
    for each in shards:
        backlog = backlogs.get(each.queue, NO_BACKLOG)
        end = each.end
        # A sealed shard whose `last` has reached its end, or that was deleted.
        is_over = end is not None and (last[each.queue] >= end or backlog.head < end)
        items.append(
            {
                "shard": each.queue,
                "stream": each.stream,
                "low": each.low,
                "high": each.high,
                "state": "done" if is_over and not each.hidden else each.state,
                "owner": owners.get(each.queue) or None,
                "backlog": backlog.count,
                "parents": list(each.parents),
            }
        )
    return items


def reshard(broker: Broker, children: Sequence[StreamShard]) -> None:
    """Store children as `StreamStore.add` does; after a lost answer, find out whether it did."""
    try:
        broker.streams.add(children)
    except UnreachableError:
        found = {each.queue: each.parents for each in broker.streams.shards(children[0].stream)}
        if any(found.get(each.queue) != each.parents for each in children):
            raise


def hidden_parents(broker: Broker | None, names: Iterable[str]) -> dict[str, Sequence[str]]:
    """Return the parents of those queues that are hidden shards."""
    if broker is None or not broker.capabilities.streams:
        return {}
    wanted = set(names)
    shards = broker.streams.resharded() if wanted else []
    return {each.queue: each.parents for each in shards if each.hidden and each.queue in wanted}
