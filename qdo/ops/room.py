"""Which queues have no node because the app has as many as the setting `max_queues` allows."""

from __future__ import annotations

from collections.abc import Collection

from qdo.brokers.base import Broker
from qdo.coordination.bulk_reads import read_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout


def crowded_out(
    client: Client | None, layout: Layout, broker: Broker | None, names: Collection[str]
) -> dict[str, str]:
    """Return why queues are not processed, by queue; reads nothing if `names` is empty.

    :param names: queues that have no node.
    """
    limit = None if broker is None else broker.max_queues
    if client is None or limit is None or not names:
        return {}
    nodes = read_children(client, [layout.queues]).get(layout.queues, ())
    if len(nodes) < limit:
        return {}
    reason = f"the app has {len(nodes)} queues, and max_queues is {limit}; see `qdo delete`"
    return dict.fromkeys(names, reason)
