"""The duty "discovery": the leader creates the nodes of the broker's queues.

The rebalancer assigns only queues that have a node. Of brokers whose queues come and go, the
leader also maintains the existing nodes: see `queue_inventory`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable

from gevent.event import Event

from qdo.brokers.base import Broker
from qdo.errors import QdoError
from qdo.queues import name_error
from qdo.text import describe, join_some, pluralize
from qdo.worker.duties.member_api import CurrentMember, LeaderApi
from qdo.worker.duties.queue_reconciler import NAMES_SHOWN, QueueReconciler
from qdo.worker.duties.runner import Duty

_log = logging.getLogger(__name__)

LEADER_LOOK_SECONDS = 0.1
"""How often the other workers check whether they lead: a look at their own memory."""
SOON_SECONDS = 0.05
"""Queues whose names arrive within this time are created together."""
RETRY_SECONDS = 1.0
"""Pause after a failure of the coordinator."""
RECONCILE_SECONDS = 5.0
"""Maximum time between two rounds for queues that come and go: the term may have changed
unseen."""


def has_dynamic_queues(broker: Broker) -> bool:
    """Return whether queues of this broker vanish or end. Then their nodes must be read."""
    can = broker.capabilities
    return can.missing_lists_before_retire is not None or can.end_position_text is not None


class Discovery(Duty):
    """Creates nodes for the broker's queues while its member leads.

    :param current: the member that `run` uses.
    """

    name = "discovery"

    def __init__(
        self, broker: Broker, clock: Callable[[], float], current: CurrentMember | None = None
    ) -> None:
        self._broker = broker
        self._refused: list[str] = []
        self._clock = clock
        self._current = current if current is not None else CurrentMember()
        self._wanted = Event()
        self._leader: LeaderApi | None = None
        self._reconciler: QueueReconciler | None = None
        self._known: set[str] = set()
        """Names listed or handed over in this term."""
        self._fresh: set[str] = set()
        """Names received since the last step."""
        self._rejected: set[str] = set()
        self._list_at = 0.0

    def run(self) -> None:
        while True:
            member = self._current.member
            pause = self.step(member.leader if member else None)
            self._wanted.wait(pause)
            self._wanted.clear()

    def names_received(self, names: Iterable[str]) -> bool:
        """Record queues that received messages; return whether one of them is new here."""
        fresh = set(names) - self._known
        self._fresh |= fresh
        if fresh:
            self._wanted.set()
        return bool(fresh)

    def step(self, member: LeaderApi | None) -> float:
        """Create the nodes of new queues; return the seconds until the next step.

        Nothing is remembered from an earlier leader or an earlier term. Creating a node that
        exists is harmless, but a queue without a node is never processed.
        """
        if member is None or not member.is_leader():
            self._leader = self._reconciler = None
            self._fresh.clear()
            return LEADER_LOOK_SECONDS
        now = self._clock()
        if member is not self._leader:
            self._leader = member
            self._known.clear()
            self._list_at = now
            self._reconciler = (
                QueueReconciler(self._broker) if has_dynamic_queues(self._broker) else None
            )
        queues = member
        if self._reconciler is None:
            return self._create(queues, now)
        try:
            return self._reconcile(self._reconciler, queues, now)
        except QdoError as error:
            _log.warning(
                "cannot update the queue nodes, retrying in %g s: %s",
                RETRY_SECONDS,
                describe(error),
            )
            return RETRY_SECONDS

    def _create(self, queues: LeaderApi, now: float) -> float:
        nodes = queues.queue_names()
        if nodes is None and self._broker.max_queues is not None:
            return SOON_SECONDS
        fresh, self._fresh = self._fresh - self._known, set()
        if now >= self._list_at:
            self._list_at = now + self._broker.catalog.list_seconds
            self._known = set(self._list() or ())
            # Most of a hundred thousand names have nodes already.
            fresh |= self._known.difference(nodes or ())
        self._known |= fresh
        usable = self._fitting(self._usable(fresh), len(nodes or ()))
        if usable:
            queues.create_queues(usable)
        return max(SOON_SECONDS, self._list_at - now)

    def _reconcile(self, reconciler: QueueReconciler, queues: LeaderApi, now: float) -> float:
        if not reconciler.look(queues):
            return SOON_SECONDS
        if now >= self._list_at:
            self._list_at = now + self._broker.catalog.list_seconds
            names = self._list()
            if names is not None and reconciler.listed(names):
                self._known = set(names)
                self._fresh.update(names)
                reconciler.reread_some(queues)
        self._known |= self._fresh
        self._fresh = fresh = self._fresh - reconciler.nodes
        fitting = self._fitting(self._usable(fresh), reconciler.count)
        pause = reconciler.act(queues, fitting, now)
        self._fresh = self._fresh - fresh
        return max(SOON_SECONDS, min(pause, self._list_at - now, RECONCILE_SECONDS))

    def _list(self) -> list[str] | None:
        try:
            # One string object per name: other parts keep the names too.
            return list(map(sys.intern, self._broker.catalog.names()))
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "cannot list the broker's queues, retrying in %g s: %s",
                self._broker.catalog.list_seconds,
                describe(error),
            )
            return None

    def _fitting(self, names: list[str], count: int) -> list[str]:
        """Return the new queues that get a node; those that have one keep it.

        :param count: number of queues that have one.
        """
        if self._broker.max_queues is None:
            return names
        room = max(0, self._broker.max_queues - count)
        refused = names[room:]
        if refused and refused != self._refused:
            self._refused = refused
            _log.error(
                "%s not processed, because the app has %s already (setting max_queues): %s;"
                " raise max_queues, or delete queues with `qdo delete`",
                "1 new queue is" if len(refused) == 1 else f"{len(refused)} new queues are",
                pluralize(count, "queue"),
                join_some(refused, NAMES_SHOWN),
            )
        return names[:room]

    def _usable(self, names: Iterable[str]) -> list[str]:
        return [name for name in sorted(names) if self._is_usable(name)]

    def _is_usable(self, name: str) -> bool:
        problem = name_error(name)
        if problem is not None and name not in self._rejected:
            self._rejected.add(name)
            _log.error(
                "queue %r is not processed: its name cannot be used for a znode: %s", name, problem
            )
        return problem is None
