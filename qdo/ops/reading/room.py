"""Which queues have no node because the app has as many as the setting `max_queues` allows."""

from __future__ import annotations

from collections.abc import Collection

from qdo.brokers.base import Broker


def crowded_out(broker: Broker | None, nodes: int, names: Collection[str]) -> dict[str, str]:
    """Return why queues are not processed, by queue.

    :param nodes: number of queues that have a node.
    :param names: queues that have no node.
    """
    limit = None if broker is None else broker.max_queues
    if limit is None or nodes < limit:
        return {}
    reason = f"the app has {nodes} queues, and max_queues is {limit}; see `qdo delete`"
    return dict.fromkeys(names, reason)
