"""Reads the status of workers. Functions return frozen values and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qdo.coordination.bulk_reads import NodeValue, names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.coordination.znodes.worker_report import LostWorker, WorkerReport
from qdo.queues import EVERYTHING, QueueFilter


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A registered worker."""

    worker: str
    queues: int
    # Number of queues that the rebalancer assigns to the worker.
    assigned: int
    # Unix time of the last write of the worker's nodes, by the coordinator's clock. A dead worker
    # stays registered until its session ends.
    reported: float
    report: WorkerReport
    # Filter of the queues that the worker may get.
    takes: QueueFilter = EVERYTHING
    # The reason why the worker gets no queues, such as a damaged node or no session, or None.
    fault: str | None = None
    # Host, process and parent process, as text for people; "" if unknown.
    process: str = ""


def worker_statuses(client: Client | None, layout: Layout) -> list[WorkerStatus]:
    """Return every registered worker, in the order of registration."""
    if client is None:
        return []
    workers = _below(client, layout.workers)
    # A worker and its component node belong to the same session.
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
                report=WorkerReport.parse(None if component is read else component.data),
                takes=node.filter,
                fault=read.refused or (None if read.session else "its node has no session"),
                process=node.process,
            )
        )
    return statuses


def lost_workers(workers: Sequence[WorkerStatus], since: float) -> list[LostWorker]:
    """Return the workers that have ended without releasing their queues `since` a Unix time."""
    # Omit a worker whose process has registered again as another worker.
    present = {each.process for each in workers}
    return [
        lost
        for each in workers
        for lost in each.report.lost_workers or ()
        if lost.at >= since and is_worker_name(lost.name)
        if not lost.process or lost.process not in present
    ]


class ProcessDeath(NamedTuple):
    """A worker process that has died, and that its parent has replaced."""

    pid: int
    # Unix time by the host's clock.
    at: float
    how: str

    def text(self, host: str | None) -> str:
        return f"process {self.pid} on {host or 'an unknown host'} {self.how}"


def deaths(
    workers: Sequence[WorkerStatus], since: float
) -> list[tuple[WorkerStatus, ProcessDeath]]:
    """Return the deaths `since` a Unix time, oldest first, with the reporting workers."""
    # Only the parent process knows about these deaths. The nodes of the dead processes are gone,
    # and their queues are free immediately.
    pairs = [(each, ProcessDeath(*death)) for each in workers for death in each.report.deaths]
    return sorted((pair for pair in pairs if pair[1].at >= since), key=lambda pair: pair[1].at)


def component_nodes(client: Client, layout: Layout) -> list[NodeValue]:
    return read_nodes(client, _below(client, f"{layout.components}/worker"))


def _below(client: Client, path: str) -> list[str]:
    return [f"{path}/{name}" for name in names_below(client, path)]
