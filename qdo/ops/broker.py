"""The broker file that the workers of an app share."""

from __future__ import annotations

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.broker_node import BrokerNode
from qdo.coordination.znodes.layout import Layout
from qdo.errors import WorkersRegisteredError
from qdo.text import join_some


def broker_node(client: Client, layout: Layout) -> BrokerNode | None:
    """Return the broker file of an app, None before its first worker with a file.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    found = [BrokerNode.parse(read.data) for read in read_nodes(client, [layout.broker])]
    return found[0] if found else None


def reset_broker(client: Client, layout: Layout) -> None:
    """Forget the broker file of an app: the next worker that registers decides.

    :raises WorkersRegisteredError: workers use the file; they would not notice the change.
    """
    workers = read_children(client, [layout.workers]).get(layout.workers)
    if workers:
        app = layout.root.rpartition("/")[2]
        raise WorkersRegisteredError(app=app, workers=join_some(sorted(workers)))
    if client.exists(layout.broker):
        client.delete(layout.broker)
