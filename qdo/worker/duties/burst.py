"""The duty "burst" stops a worker with the setting `burst` once all messages are processed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import gevent

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.positions import Positions
from qdo.system.clock import clock
from qdo.text import describe
from qdo.worker.duties.duty import Duty

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
# Minimum pause between two surveys, as a multiple of the duration of the last survey. Surveys of
# thousands of queues are expensive.
LOOK_SHARE = 10


@dataclass(frozen=True, slots=True)
class FleetSurvey:
    """The state of the queues that this worker does not own."""

    # The queues that no live worker lists.
    unattended: list[str]
    # The position, by queue, of the queues that another worker lists.
    elsewhere: dict[str, int]


class Burst(Duty):
    """Checks whether the workers of the app have processed all messages.

    The check ignores queues that this worker's filter excludes, queues without a job in the app,
    and queues that are damaged, deleted or blocked.

    :param is_idle: returns whether this worker has claimed and fully processed all of its queues.
    """

    name = "burst"

    def __init__(
        self,
        app: App,
        broker: Broker,
        takes: Callable[[str], bool],
        survey: Callable[[Iterable[str]], FleetSurvey],
        is_idle: Callable[[], bool],
        finish: Callable[[str], None],
    ) -> None:
        self._app = app
        self._broker = broker
        self._takes = takes
        self._survey = survey
        self._is_idle = is_idle
        self._finish = finish

    def run(self) -> None:
        while (pause := self.step()) is not None:
            gevent.sleep(pause)
        self._finish("every queue is fully processed; this worker was started with burst and stops")

    def step(self) -> float | None:
        """Check once; return None if all messages are processed, otherwise the seconds to wait."""
        start = clock()
        if self._is_idle() and self._is_done_everywhere() and self._is_idle():
            return None
        return max(LOOK_SECONDS, LOOK_SHARE * (clock() - start))

    def _is_done_everywhere(self) -> bool:
        # Checking this worker's queues is not enough. A worker killed with SIGKILL counts as alive
        # until its session ends. If all other workers had left by then, its queues would have no
        # owner. So no message may wait after the `last` of any queue, and a live worker must list
        # each queue.
        try:
            names = [
                name
                for name in self._broker.catalog.names()
                if self._takes(name) and self._app.job_for(name) is not None
            ]
            streams = self._broker.capabilities.streams and self._broker.streams
            if streams and any(each.hidden for each in streams.resharded()):
                return False
            survey = self._survey(names)
            return not survey.unattended and not any(
                self._broker.catalog.backlog(name, last).count
                for name, last in survey.elsewhere.items()
            )
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "cannot determine whether every queue is processed, retrying: %s", describe(error)
            )
            return False


def fleet_survey(
    client: Client, layout: Layout, positions: Positions, worker: str, queues: Iterable[str]
) -> FleetSurvey:
    """Return the survey of these queues, without the queues of `worker`.

    Omit queues that are damaged, deleted or blocked.
    """
    workers = read_children(client, [layout.workers]).get(layout.workers, [])
    owned: set[str] = set()
    mine: frozenset[str] = frozenset()
    for read in read_nodes(client, [layout.worker(name) for name in workers]):
        listed = frozenset(WorkerNode.parse(read.data).queues)
        owned |= listed
        if read.path == layout.worker(worker):
            mine = listed
    others = sorted(set(queues) - mine)
    nodes = {
        read.path.rpartition("/")[2]: QueueNode.parse(read.data, read.refused).checked(positions)
        for read in read_nodes(client, [layout.queue(name) for name in others])
    }
    usable = {name: node for name in others if _is_usable(node := nodes.get(name, NEW))}
    return FleetSurvey(
        unattended=[name for name in usable if name not in owned],
        elsewhere={
            name: positions.resume_after(node.last, node.position)
            for name, node in usable.items()
            if name in owned
        },
    )


def _is_usable(node: QueueNode) -> bool:
    """Return whether the queue may be processed now; a blocked queue waits for an operator."""
    return not (node.fault or node.deleted or (node.failure is not None and node.failure.blocked))
