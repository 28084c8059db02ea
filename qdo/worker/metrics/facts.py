"""Read facts of the whole app for `/metrics`, such as its backlog, on the leader.

The duration of a reading grows with the number of queues, so the pause after a reading also grows.
The page omits facts that the leader cannot read, and all facts of a worker that does not lead. So
no metric shows an outdated value. The module `monitor` explains the case of a frozen worker.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import gevent

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.brokers.catalog import Backlog
from qdo.brokers.requests import STATES as STATE_NAMES
from qdo.brokers.requests import PoolCounts
from qdo.coordination.bulk_reads import names_below, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.leader_queues import LeaderQueues
from qdo.coordination.protocol.machine import CheckOp
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.errors import CoordinatorUnreachableError, NodeRefusedError, QdoError
from qdo.fleet.timer_node import read_timers
from qdo.ops.snapshot import ask, backlog_of
from qdo.positions import Positions, time_of_position
from qdo.queues import POOL, QueueFilter, why_untaken
from qdo.system.clock import clock
from qdo.text import describe
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.engine.meters import MOST_GLOBS, OTHERS
from qdo.worker.metrics import catalog
from qdo.worker.metrics.catalog import Metric

Rows = list[tuple[tuple[str, ...], list[float]]]
Facts = dict[Metric, Rows]

# Seconds between a follower's checks for leadership.
LOOK_SECONDS = 1.0
# Minimum period of readings in seconds, maximum share of the time for readings, and maximum period
# in seconds.
PERIOD_SECONDS = 10.0
SHARE = 0.02
MOST_SECONDS = 60.0
# Number of queues to read before other greenlets run.
CHUNK = 250
# Maximum number of queues to look up if each backlog costs a request to the broker.
ASKED = 3
STATES_OF_REQUESTS = STATE_NAMES[:3]
UNTAKEN = ("no-job", "excluded", "pool", "not-claimed", "damaged")
_UNTAKEN = {"no job": "no-job", POOL: "pool"}

_log = logging.getLogger(__name__)


def one(value: float) -> Rows:
    return [((), [float(value)])]


def rows(values: Mapping[str, float]) -> Rows:
    return [((label,), [float(value)]) for label, value in values.items()]


class AppFacts:
    """Reads the facts of an app while this worker leads."""

    def __init__(self, app: App, broker: Broker, current: CurrentMember) -> None:
        self.broker_errors = 0
        self._app = app
        self._broker = broker
        self._current = current
        self._counts_all = broker.capabilities.backlog_budget is None
        self._found: Facts = {}

    def run(self) -> None:
        while True:
            gevent.sleep(self.step())

    def step(self) -> float:
        """Read the facts if this worker leads; return the seconds until the next step."""
        leader = self._leader()
        if leader is None:
            self._found = {}
            return LOOK_SECONDS
        began = clock()
        try:
            leader.with_fence(partial(self._read, leader))
        except QdoError as error:  # the coordinator is unreachable
            self._note(error)
            self._found = {}
        least = PERIOD_SECONDS if self._counts_all else MOST_SECONDS
        return min(max(least, (clock() - began) / SHARE), MOST_SECONDS)

    def _read(self, leader: LeaderQueues, client: Client, layout: Layout, fence: CheckOp) -> int:
        readers: tuple[Callable[[], Facts], ...] = (
            self._messages,
            partial(self._queues, leader, client, layout),
            partial(self._timers, client, layout),
        )
        facts: Facts = {}
        for read in readers:  # an unreadable fact must not hide other facts
            try:
                facts |= read()
            except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
                self._note(error)
        self._found = facts
        return 0

    def _note(self, error: Exception) -> None:
        of_coordinator = isinstance(error, CoordinatorUnreachableError | NodeRefusedError)
        self.broker_errors += not of_coordinator
        _log.debug("cannot read facts of the app for /metrics: %s", describe(error))

    def values(self) -> Facts:
        """Return the rows of each known metric; no metrics while another worker leads."""
        leader = self._leader()
        if leader is None:
            return {}
        outbox = {
            catalog.OUTBOX_REFUSED: rows(leader.refused_rows),
            catalog.OUTBOX_WAITING: rows(leader.waiting_rows),
        }
        return self._found | outbox

    def holds_until(self) -> float:
        """Return the clock time at which the leadership may end; 0 if this worker does not lead."""
        member = self._current.member
        return 0.0 if member is None or self._leader() is None else member.lease.until

    def _leader(self) -> LeaderQueues | None:
        member = self._current.member
        return member.leader if member is not None and member.leader.is_leader() else None

    def _messages(self) -> Facts:
        """Read the broker's counts of dead letters and requests."""
        facts: Facts = {}
        letters = {"message": self._broker.dead_letters.total()}
        counts: Mapping[str, PoolCounts] = {}
        if self._broker.capabilities.requests:
            counts = self._broker.requests.counts()
            letters["request"] = sum(each.failed for each in counts.values())
        if any(job.pool for job in self._app.jobs):
            states = pool_states(counts, self._app).items()
            facts[catalog.REQUESTS] = [(key, [float(number)]) for key, number in states]
        facts[catalog.DEAD_LETTERS] = rows(letters)
        return facts

    def _queues(self, leader: LeaderQueues, client: Client, layout: Layout) -> Facts:
        """Read the backlogs of all queues, or of some unowned queues if each costs a request."""
        workers = worker_filters(client, layout)
        backlog = AppBacklog({each for each in workers.values() if each is not None})
        names = {*(leader.queue_names() or ())}
        if self._counts_all:
            names |= {*self._broker.catalog.names()}
        queues = sorted(names)
        for start in range(0, len(queues), CHUNK):
            some = queues[start : start + CHUNK]
            nodes = leader.read_queues(some)
            whole = backlog.without_damaged(some, nodes, self._broker.positions)
            for name, each in self._backlogs(whole, nodes, workers, backlog.asked).items():
                backlog.add(name, each, is_owned=nodes.get(name, NEW).owner in workers)
            gevent.sleep(0)
        facts = {catalog.UNTAKEN: rows(backlog.untaken)}
        if self._counts_all:
            oldest = backlog.oldest
            age = 0.0 if oldest is None else time.time() - time_of_position(oldest)
            facts[catalog.BACKLOG] = one(backlog.waiting)
            facts[catalog.BACKLOG_AGE] = one(max(0.0, age))
            facts[catalog.DELAYED] = one(backlog.delayed)
        return facts

    def _backlogs(
        self,
        names: Sequence[str],
        nodes: Mapping[str, QueueNode],
        workers: Collection[str],
        asked: int,
    ) -> dict[str, Backlog]:
        if self._counts_all:
            found = ask(self._broker, names, nodes, workers, None)
            return {name: each for name, each in found.items() if isinstance(each, Backlog)}
        free = [name for name in names if nodes.get(name, NEW).owner not in workers]
        answers: dict[str, Backlog] = {}
        for name in free[: max(0, ASKED - asked)]:
            node = nodes.get(name, NEW)
            after = self._broker.positions.resume_after(node.last, node.position)
            answers[name] = backlog_of(self._broker, name, node, after)
        return answers

    def _timers(self, client: Client, layout: Layout) -> Facts:
        """Read the delays of the app's timers, and the number of refused timers."""
        if not self._app.timers:
            return {}
        nodes = read_timers(client, layout, self._app.timers).values()
        late = [time.time() - each.next for each in nodes if each.when and each.next]
        refused = sum(1 for each in nodes if each.refused or each.fault is not None)
        return {
            catalog.TIMER_LATE: one(max([0.0, *late])),
            catalog.TIMERS_REFUSED: one(refused),
        }


def worker_filters(client: Client, layout: Layout) -> dict[str, QueueFilter | None]:
    """Return the filters of the registered workers, by name; None for a draining worker."""
    paths = [f"{layout.workers}/{name}" for name in names_below(client, layout.workers)]
    nodes = {read.path: WorkerNode.parse(read.data) for read in read_nodes(client, paths)}
    return {
        path.rpartition("/")[2]: None if node.draining else node.filter
        for path, node in nodes.items()
    }


@dataclass(slots=True)
class AppBacklog:
    """The counts of the messages that wait in the queues of an app."""

    # The filters of the workers that do not drain.
    filters: Collection[QueueFilter]
    waiting: int = 0
    delayed: int = 0
    # Position of the message that has waited longest.
    oldest: int | None = None
    asked: int = 0
    # Number of queues with messages that no worker processes, by reason.
    untaken: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(UNTAKEN, 0)))

    def without_damaged(
        self, names: Sequence[str], nodes: Mapping[str, QueueNode], positions: Positions
    ) -> list[str]:
        """Count the queues with damaged nodes; return the other queues."""
        whole = [name for name in names if nodes.get(name, NEW).checked(positions).fault is None]
        self.untaken["damaged"] += len(names) - len(whole)
        return whole

    def add(self, name: str, backlog: Backlog, *, is_owned: bool) -> None:
        self.asked += 1
        self.delayed += backlog.delayed
        if not backlog.count:
            return
        self.waiting += backlog.count
        if backlog.oldest is not None:
            self.oldest = min(self.oldest or backlog.oldest, backlog.oldest)
        if not is_owned:
            why = why_untaken(name, self.filters)
            self.untaken["not-claimed" if why is None else _UNTAKEN.get(why, "excluded")] += 1


def pool_states(counts: Mapping[str, PoolCounts], app: App) -> Counter[tuple[str, str]]:
    """Return the number of requests by state and by the glob of their pool's job."""
    globs = [job.queues for job in app.jobs if job.pool][:MOST_GLOBS]
    states = Counter({(glob, state): 0 for glob in globs for state in STATES_OF_REQUESTS})
    for pool, each in counts.items():
        job = app.job_for(pool)
        glob = job.queues if job is not None and job.queues in globs else OTHERS
        for state in STATES_OF_REQUESTS:
            states[glob, state] += getattr(each, state)
    return states
