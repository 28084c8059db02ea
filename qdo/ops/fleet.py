"""The coordinator and the broker on which an operation acts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import NodeRead
from qdo.coordination.transactions import read
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.errors import CorruptNodeError, NotFoundError
from qdo.queues import check_path_part


@dataclass(frozen=True, slots=True)
class Fleet:
    """The coordinator and the broker of an app."""

    # None if the coordinator is a file that does not exist yet.
    client: Client | None
    layout: Layout
    broker: Broker

    def connected(self, queue: str) -> Client:
        """Return the client. If there is no client, raise NotFoundError for the queue."""
        if self.client is None:
            raise NotFoundError(what="queue", name=queue)
        return self.client

    def node(self, queue: str) -> QueueNode | None:
        """Return the node of a queue, or None; raise CorruptNodeError if the node is damaged."""
        if self.client is None:
            return None
        node = read_queues(self.client, self.layout, [check_path_part(queue)]).get(queue)
        if node is not None and node.fault is not None:
            raise CorruptNodeError(queue=queue, reason=node.fault)
        return node

    def known_node(self, queue: str) -> QueueNode:
        """Return the node of a queue, or a new node if the queue exists only at the broker."""
        node = self.node(queue)
        if node is None and queue not in self.broker.catalog.names():
            raise NotFoundError(what="queue", name=queue)
        return node or NEW


def read_queues(
    client: Client | None, layout: Layout, queues: Iterable[str]
) -> dict[str, QueueNode]:
    """Return the existing nodes of queues, including damaged nodes."""
    paths = [layout.queue(queue) for queue in queues]
    reads = [] if client is None else read_nodes(client, paths)
    return {
        each.path.rpartition("/")[2]: QueueNode.parse(each.data, each.refused) for each in reads
    }


def read_queue(client: Client, layout: Layout, queue: str) -> QueueNode:
    """Return the node of a queue, even a damaged node; raise NotFoundError if it is missing."""
    node = read(client, layout.queue(check_path_part(queue)))
    if not isinstance(node, NodeRead):
        raise NotFoundError(what="queue", name=queue)
    return QueueNode.parse(node.data)
