"""Reads what the leader plans with: workers, assignments, queues, and the moves of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.assignments import present_shares
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode, parse_assignment, parse_moves


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The leader's input, as this account reads it.

    :ivar queues: the queues that are not marked as deleted.
    :ivar workers: the nodes of registered workers.
    :ivar unable: by worker, why it gets no queues.
    :ivar current: the present queues of each registered worker.
    :ivar left: the queues in assignments of workers that are gone, with that worker.
    :ivar moves: the worker of each queue that an operator moved.
    """

    queues: Sequence[str]
    workers: Mapping[str, WorkerNode]
    unable: Mapping[str, str]
    current: Mapping[str, list[str]]
    left: Mapping[str, str]
    moves: Mapping[str, str]


def read_plan_input(client: Client, layout: Layout) -> PlanInput:
    """Read the nodes that the leader plans with.

    :raises NodeRefusedError: this account may not list them.
    :raises CoordinatorUnreachableError: the connection is lost.
    """
    folders = [layout.workers, layout.assignments, layout.queues]
    names = read_children(client, folders)
    workers: dict[str, WorkerNode] = {}
    unable: dict[str, str] = {}
    listed = [name for name in names.get(layout.workers, []) if is_worker_name(name)]
    for read in read_nodes(client, [layout.worker(name) for name in listed]):
        name = read.path.rpartition("/")[2]
        workers[name] = WorkerNode.parse(read.data)
        if read.refused is not None:
            unable[name] = f"its node cannot be read: {read.refused}"
        elif not read.session:
            unable[name] = "its node has no session"
            del workers[name]
        elif workers[name].draining:
            unable[name] = "it is draining"
    granted = [name for name in names.get(layout.assignments, []) if is_worker_name(name)]
    assigned: dict[str, frozenset[str]] = {}
    for read in read_nodes(client, [layout.assignment(name) for name in granted]):
        share = parse_assignment(read.data) if read.refused is None else None
        if share is not None:
            assigned[read.path.rpartition("/")[2]] = share
    folder = read_nodes(client, [layout.assignments])
    return PlanInput(
        queues=_live(client, layout, names.get(layout.queues, [])),
        workers=workers,
        unable=unable,
        current=present_shares(assigned, workers),
        left={
            queue: name
            for name, share in assigned.items()
            if name not in workers
            for queue in share
        },
        moves=parse_moves(folder[0].data) if folder else {},
    )


def _live(client: Client, layout: Layout, names: Sequence[str]) -> list[str]:
    """Return the queues that are not marked as deleted."""
    reads = read_nodes(client, [layout.queue(name) for name in names])
    deleted = {
        read.path.rpartition("/")[2]
        for read in reads
        if read.refused is None and QueueNode.parse(read.data).deleted
    }
    return [name for name in names if name not in deleted]
