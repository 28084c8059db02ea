"""The status of workers. Reads only, and returns frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from qdo.coordination.bulk_reads import NodeValue, read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.protocol.worker_roll import LostWorker
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.values import load
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.queues import EVERYTHING, QueueFilter
from qdo.text import one_line


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A registered worker.

    :ivar queues: how many queues it owns.
    :ivar assigned: how many queues the rebalancer assigns to it.
    :ivar takes: filter of the queues that may be assigned to it.
    :ivar reported: when it last wrote its nodes, Unix time of the coordinator's clock. A dead
        worker stays registered until its session ends.
    :ivar fault: why it gets no queues: its node cannot be read, or does not belong to a session.
    :ivar process: host and parent process, for people; "" if it is not known.
    :ivar details: data published by its process: host, pid, version, started, state, ...
    """

    worker: str
    queues: int
    assigned: int
    reported: float
    details: tuple[tuple[str, Any], ...]
    takes: QueueFilter = EVERYTHING
    fault: str | None = None
    process: str = ""


def worker_statuses(client: Client, layout: Layout) -> list[WorkerStatus]:
    """Return every registered worker, in the order of registration.

    A worker and its component node are matched by their session.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    workers = _below(client, layout.workers)
    described = {read.session: read for read in component_nodes(client, layout) if read.session}
    names = [path.rpartition("/")[2] for path in workers]
    assigned = {
        read.path.rpartition("/")[2]: len(WorkerNode.parse(read.data).queues)
        for read in read_nodes(client, [layout.assignment(name) for name in names])
    }
    statuses = []
    for read in read_nodes(client, workers):
        name = read.path.rpartition("/")[2]
        node = WorkerNode.parse(read.data)
        component = described.get(read.session, read)
        statuses.append(
            WorkerStatus(
                worker=name,
                queues=len(node.queues),
                assigned=assigned.get(name, 0),
                reported=max(read.written, component.written),
                details=() if component is read else details_of(component.data),
                takes=node.filter,
                fault=read.refused or (None if read.session else "its node has no session"),
                process=node.process,
            )
        )
    return statuses


def lost_workers(workers: Sequence[WorkerStatus], since: float) -> list[LostWorker]:
    """Return the workers that went without releasing their queues, as the leader tells.

    Those whose process has started another worker are left out, and so are entries that make no
    sense: another program wrote them.

    :param since: Unix time of the oldest to return.
    """
    present = {each.process for each in workers}
    found = [_lost_worker(entry) for each in workers for entry in _entries(each)]
    wanted = (each for each in found if each is not None and each.at >= since)
    return [each for each in wanted if not each.process or each.process not in present]


def _entries(worker: WorkerStatus) -> list[Any]:
    entries = dict(worker.details).get("lost_workers")
    return entries if isinstance(entries, list) else []


def _lost_worker(entry: Any) -> LostWorker | None:
    if not isinstance(entry, dict) or entry.keys() != {each.name for each in fields(LostWorker)}:
        return None
    name, process, queues, at = (entry[each.name] for each in fields(LostWorker))
    texts = isinstance(name, str) and is_worker_name(name) and isinstance(process, str)
    if not texts or type(queues) is not int or not isinstance(at, int | float):
        return None
    return LostWorker(name, one_line(process), queues, float(at))


def details_of(data: bytes) -> tuple[tuple[str, Any], ...]:
    """Return the content of a component node; empty if it cannot be read."""
    value, _ = load(data)
    return tuple(value.items())


def component_nodes(client: Client, layout: Layout) -> list[NodeValue]:
    """Return the nodes in which the worker processes describe themselves."""
    return read_nodes(client, _below(client, f"{layout.components}/worker"))


def _below(client: Client, path: str) -> list[str]:
    return [f"{path}/{name}" for name in read_children(client, [path]).get(path, ())]
