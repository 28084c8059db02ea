"""Finds the worker that owns a queue. Other processes can then send requests to the worker.

The answer comes from the node of the queue and the node of the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that owns a queue.

    The worker may have stopped or lost the queue meanwhile. Therefore a worker that receives a
    request must check that it owns the queue.

    :ivar worker: name of the worker's node.
    :ivar process: host, process and parent process of the worker, for people to read.
    :ivar zone: the worker's setting `zone`.
    :ivar address: the worker's setting `address`, at which the worker serves requests.
    """

    queue: str
    worker: str
    process: str = ""
    zone: str = ""
    address: str = ""


def find_owner(client: Client, layout: Layout, queue: str) -> Owner | None:
    """Return the owner of a queue; None if the queue has no owner, or if the owner is gone."""
    for node in read_nodes(client, [layout.queue(queue)]):
        worker = QueueNode.parse(node.data, node.refused).owner
        for found in read_nodes(client, [layout.worker(worker)] if worker else []):
            told = WorkerNode.parse(found.data)
            return Owner(queue, worker, told.process, told.zone, told.address)
    return None
