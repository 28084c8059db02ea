"""Maintains the nodes of queues that come and go; `queue_inventory` decides, this acts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from qdo.brokers.base import Broker
from qdo.coordination import queue_admin
from qdo.errors import CorruptNodeError, NodeRefusedError
from qdo.queues import command_text
from qdo.text import describe, pluralize
from qdo.worker.duties.member_api import Change, LeaderApi
from qdo.worker.duties.queue_inventory import QueueInventory

_log = logging.getLogger(__name__)

PARENTS_SECONDS = 1.0
"""How often the leader reads the progress of parents for which queues wait."""
REREAD_PER_LIST = 5000
"""Nodes read again with each list: an operator may have changed one."""
READ_AT_ONCE = 1000
"""Nodes parsed in one go, which takes some 10 ms; then other greenlets may run."""
CHANGED_AT_ONCE = 100
"""Queues retired, restored or marked finished in one step, to keep each step short."""
NAMES_SHOWN = 20
_NEVER = float("inf")


class QueueReconciler:
    """Maintains the queue nodes of a broker for one term of the leader.

    It runs in the greenlet of discovery: waiting for broker or coordinator delays no other duty.
    A failure is raised, and the next step repeats the work.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._end_text = broker.capabilities.end_position_text
        self._missing_lists = broker.capabilities.missing_lists_before_retire
        self._inventory = QueueInventory(self._end_text, self._missing_lists)
        self._names: Sequence[str] | None = None
        self._parents: dict[str, tuple[str, ...]] = {}
        self._round: list[str] = []
        """Nodes still to be read again."""
        self._excluded: frozenset[str] = frozenset()
        self._logged_waiting: set[str] = set()
        self._logged_corrupt: set[str] = set()
        self._parents_at = 0.0
        self._listed = 0

    @property
    def nodes(self) -> AbstractSet[str]:
        """The names of all queue nodes, as last seen."""
        return self._inventory.nodes

    @property
    def count(self) -> int:
        """The number of queue nodes, without those marked as deleted."""
        return len(self._inventory.nodes - self._inventory.deleted)

    def look(self, queues: LeaderApi) -> bool:
        """Update the names of all queue nodes; the first time, read the nodes as well.

        :returns: False while the names are unknown.
        :raises CoordinatorUnreachableError: the connection is lost.
        """
        names = queues.queue_names()
        if names is None:
            return False
        if names is not self._names:
            self._names = names
            self._inventory.nodes = frozenset(names)
        if not self._inventory.complete:
            self._read(queues, list(names))
            self._inventory.complete = True
            self._exclude_deleted(queues)
        return True

    def listed(self, names: Sequence[str]) -> bool:
        """Record a list of the broker; return False if the parents of its queues are unknown."""
        if self._listed and not names and self._missing_lists is not None:
            _log.warning(
                "the broker no longer lists any queue, after %s; retiring them after %s in a row",
                pluralize(self._listed, "queue"),
                pluralize(self._missing_lists, "such response"),
            )
        self._listed = len(names)
        if self._end_text is not None:
            # The names of waiting queues may belong to recreated queues by now.
            known = self._parents.keys() - self._inventory.waiting
            try:
                self._parents = {
                    name: self._parents[name]
                    if name in known
                    else tuple(self._broker.catalog.parents(name))
                    for name in names
                }
            except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
                _log.warning(
                    "cannot read the parents of queues, retrying with the next list: %s",
                    describe(error),
                )
                return False
        self._find_reopened(names)
        with_parents = {name: each for name, each in self._parents.items() if each}
        self._inventory.listed(names, with_parents)
        return True

    def _find_reopened(self, names: Sequence[str]) -> None:
        """Find finished queues that were recreated under the same name, and log new ones."""
        inventory = self._inventory
        # The finished ones were read before the broker was asked for the list.
        reopened = {
            name
            for name in names
            if name in inventory.finished and self._broker.catalog.is_reopened(name)
        }
        for name in sorted(reopened - inventory.reopened):
            _log.error(
                "queue %s was finished, but a queue of the same name now receives messages; it is"
                " not processed. To start it from the beginning: `%s`",
                name,
                command_text("seek", name, "earliest", options="--yes"),
            )
        inventory.reopened = reopened

    def reread_some(self, queues: LeaderApi) -> None:
        """Read some of the nodes again that others may have changed, in turn."""
        if not self._round:
            self._round = list(self._inventory.deleted)
            if self._end_text is not None:
                self._round = list(self._inventory.nodes)
        some, self._round = self._round[:REREAD_PER_LIST], self._round[REREAD_PER_LIST:]
        self._read(queues, some)

    def act(self, queues: LeaderApi, fresh: Sequence[str], now: float) -> float:
        """Update the nodes of all queues, and create those of `fresh` ones.

        :returns: the seconds until the next step.
        """
        self._start(queues, fresh, now)
        inventory = self._inventory
        more = self._change(
            queues,
            inventory.vanished(),
            queue_admin.retire,
            "retired %s that the broker no longer has, keeping the nodes and marking them as"
            " deleted: %s",
        )
        more |= self._change(queues, inventory.returned(), queue_admin.restore, "restored %s: %s")
        mark = partial(queue_admin.mark_finished, finished=self._end_text or "")
        more |= self._change(
            queues, inventory.to_mark_finished(), mark, "marked %s as finished: %s"
        )
        if more:
            return 0.0  # excluding each part by itself would make the rebalancer plan each time
        self._exclude_deleted(queues)
        busy = inventory.waiting or inventory.finished - inventory.deleted
        return PARENTS_SECONDS if busy else _NEVER

    def _start(self, queues: LeaderApi, fresh: Sequence[str], now: float) -> None:
        """Create the nodes of new queues, and of queues whose parents are over."""
        inventory = self._inventory
        if self._end_text is not None:
            # The parents of the others are unknown until the next list.
            fresh = [name for name in fresh if name in self._parents]
        new = [name for name in fresh if not self._must_wait(name)]
        if inventory.waiting and now >= self._parents_at:
            self._parents_at = now + PARENTS_SECONDS
            self._read(queues, inventory.awaited())
        ready = inventory.take_ready()
        _log_names("starting %s whose parents are finished: %s", ready)
        if new:
            queues.create_queues(new)
        if ready:
            # They are children of queues of this app, unless the app had no queue before.
            queues.create_queues(ready, self._broker.catalog.child_start if inventory.nodes else 0)
        waiting = set(inventory.waiting)
        _log_names(
            "holding %s back until their parents are finished: %s", waiting - self._logged_waiting
        )
        self._logged_waiting = waiting

    def _must_wait(self, name: str) -> bool:
        parents = self._parents.get(name, ())
        if parents and self._inventory.wait(name, parents):
            self._parents_at = 0.0
        return bool(parents)

    def _change(self, queues: LeaderApi, names: list[str], change: Change, template: str) -> bool:
        """Change some nodes; return whether any are left to change."""
        some = names[:CHANGED_AT_ONCE]
        done = []
        for name in some:
            try:
                queues.change_queue(change, name)
            except (CorruptNodeError, NodeRefusedError) as error:
                if name not in self._logged_corrupt:
                    self._logged_corrupt.add(name)
                    _log.error(
                        "queue %s: its node cannot be changed; it is not retired, restored or"
                        " finished: %s",
                        name,
                        describe(error),
                    )
            else:
                done.append(name)
        self._read(queues, done)
        for name in some:
            self._inventory.settled(name)
        _log_names(template, done)
        return len(names) > len(some)

    def _read(self, queues: LeaderApi, names: Sequence[str]) -> None:
        for start in range(0, len(names), READ_AT_ONCE):
            some = names[start : start + READ_AT_ONCE]
            self._inventory.read(some, queues.read_queues(some))

    def _exclude_deleted(self, queues: LeaderApi) -> None:
        """Exclude the deleted queues from assignment.

        Repeated each time: a rebalancer that lost and regained leadership has forgotten them.
        """
        if self._inventory.deleted != self._excluded:
            self._excluded = frozenset(self._inventory.deleted)
        queues.exclude_deleted(self._excluded)


def _log_names(template: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = "" if len(listed) <= NAMES_SHOWN else ", ..."
        _log.info(template, pluralize(len(listed), "queue"), ", ".join(listed[:NAMES_SHOWN]) + more)
