"""Which worker owns a queue, for those who ask it something.

The answer is derived from two nodes, the queue's and the worker's, so no write records it.
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

    It may have stopped, or lost the queue, since: a process that is asked checks what it owns.

    :ivar worker: name of its node.
    :ivar process: its host, process and parent process, for people.
    :ivar zone: its setting `zone`.
    :ivar address: its setting `address`, where it answers.
    """

    queue: str
    worker: str
    process: str = ""
    zone: str = ""
    address: str = ""


def find_owner(client: Client, layout: Layout, queue: str) -> Owner | None:
    """Return the owner of a queue; None without one, or if its worker is gone."""
    for node in read_nodes(client, [layout.queue(queue)]):
        worker = QueueNode.parse(node.data, node.refused).owner
        for found in read_nodes(client, [layout.worker(worker)] if worker else []):
            told = WorkerNode.parse(found.data)
            return Owner(queue, worker, told.process, told.zone, told.address)
    return None
