"""The duty "discovery" of the leader creates and maintains the nodes of the broker's queues.

The rebalancer assigns only queues that have a node. If a broker's queues come and go, the leader
also maintains the existing nodes. `QueueInventory` makes the decisions without I/O.

=========  ============================================================  =======================
queue      meaning                                                       next
=========  ============================================================  =======================
waiting    listed, without a node: a parent is not finished              in use
in use     it has a node                                                 retired, finished
retired    it vanished from the broker: its node is marked as deleted    in use (listed again)
finished   completely processed: its node is a tombstone, marked as      in use (an operator
           deleted, and it is never started again                        resets or seeks it)
=========  ============================================================  =======================

A queue starts after all its parents are over, for any order of discovery. A parent is over in three
cases:

- its node is marked as finished, and the queue was not recreated afterwards;
- it has no node and the broker does not list it, because it was finished long ago;
- it vanished unfinished and is retired, because no worker can read its remaining messages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from gevent.event import Event

from qdo.brokers.base import Broker
from qdo.coordination import queue_admin
from qdo.coordination.leader_queues import Change, LeaderQueues
from qdo.coordination.queue_admin import is_deleted
from qdo.coordination.znodes.queue_node import NEW, QueueNode
from qdo.errors import CorruptNodeError, NodeRefusedError, QdoError
from qdo.queues import command_text, name_error
from qdo.text import describe, join_some, pluralize
from qdo.worker.duties.duty import CurrentMember, Duty
from qdo.worker.duties.streams import OPEN_SECONDS, ShardOpener

_log = logging.getLogger(__name__)

# Seconds between two reads of the progress of parents whose children wait.
PARENTS_SECONDS = 1.0
# Number of nodes that the leader rereads after each list, to find changes by operators.
REREAD_PER_LIST = 5000
# Number of nodes to parse before other greenlets run. Parsing takes about 10 ms.
READ_AT_ONCE = 1000
# Maximum number of queues to retire, restore or mark as finished in one step. Steps must be short.
CHANGED_AT_ONCE = 100
NAMES_SHOWN = 20
# Seconds between a follower's checks for leadership. The check only reads memory.
LEADER_LOOK_SECONDS = 0.1
# Seconds for which the leader collects new names, to create their queues together.
SOON_SECONDS = 0.05
# Pause after a failure of the coordinator, in seconds.
RETRY_SECONDS = 1.0
# Maximum seconds between two rounds for brokers whose queues come and go.
RECONCILE_SECONDS = 5.0
_NEVER = float("inf")


class QueueInventory:
    """The queues of one broker and their nodes during one term of the leader.

    :ivar complete: whether the leader has read every node that existed at the start of the term.
    :ivar deleted: queues whose nodes the leader or an operator has marked as deleted.
    :ivar finished: queues whose nodes are at the end position.
    :ivar reopened: finished queues that the broker lists again as new queues of the same name.
    :ivar nodes: names of all queue nodes in the last list.
    """

    def __init__(
        self, end_position_text: str | None, missing_lists_before_retire: int | None
    ) -> None:
        self.complete = False
        self.deleted: set[str] = set()
        self.finished: set[str] = set()
        self.reopened: AbstractSet[str] = frozenset()
        self.nodes: AbstractSet[str] = frozenset()
        self._end_position_text = end_position_text
        self._misses_before_retire = missing_lists_before_retire
        self._listed: AbstractSet[str] = frozenset()
        self._retired: set[str] = set()
        self._misses: dict[str, int] = {}
        self._parents: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, tuple[str, ...]] = {}

    def read(self, names: Iterable[str], nodes: Mapping[str, QueueNode]) -> None:
        """Record the nodes of these queues; `nodes` contains the existing nodes."""
        for name in names:
            node = nodes.get(name, NEW)
            _put(self.deleted, name, node.deleted)
            _put(self._retired, name, is_deleted(node))
            over = self._end_position_text is not None and node.position == self._end_position_text
            _put(self.finished, name, over)

    def listed(self, names: Collection[str], parents: Mapping[str, tuple[str, ...]]) -> None:
        """Record the broker's list of queues, requested after the nodes were read."""
        self._listed = frozenset(names)
        self._parents = dict(parents)
        for name, awaited in list(self._waiting.items()):
            if name not in self._listed or self._parents.get(name) != awaited:
                del self._waiting[name]  # vanished or recreated
        if self._misses_before_retire is not None:
            missing = (self.nodes - self._listed) - self.deleted
            self._misses = {name: self._misses.get(name, 0) + 1 for name in missing}

    def vanished(self) -> list[str]:
        """Return the queues to retire."""
        limit = self._misses_before_retire
        if limit is None:
            return []
        return sorted(name for name, count in self._misses.items() if count >= limit)

    def settled(self, name: str) -> None:
        """Record that the leader has changed the node of a queue, or currently cannot change it."""
        self._misses.pop(name, None)
        if name not in self.deleted:
            self.finished.discard(name)  # until the next read of its node

    def returned(self) -> list[str]:
        """Return the retired queues that the broker lists again."""
        return sorted((self._retired & self._listed) - self.finished)

    def over(self, parent: str) -> bool:
        """Return whether a parent is over, so that its children may start."""
        if parent in self.nodes:
            vanished = parent in self._retired and parent not in self._listed
            return (parent in self.finished and parent not in self.reopened) or vanished
        return parent not in self._listed

    def wait(self, name: str, parents: Sequence[str]) -> bool:
        """Let a queue wait for its parents; return whether the wait is new."""
        new = name not in self._waiting
        self._waiting[name] = tuple(parents)
        return new

    @property
    def waiting(self) -> AbstractSet[str]:
        return self._waiting.keys()

    def awaited(self) -> list[str]:
        """Return the unfinished parents of waiting queues; the leader rereads their nodes."""
        wanted = {parent for parents in self._waiting.values() for parent in parents}
        return sorted((wanted & self.nodes) - self.finished)

    def take_ready(self) -> list[str]:
        """Return the waiting queues whose parents are all over, and end their wait."""
        ready = [name for name, parents in self._waiting.items() if all(map(self.over, parents))]
        for name in ready:
            del self._waiting[name]
        return sorted(ready)

    def to_mark_finished(self) -> list[str]:
        """Return the finished queues whose children all have nodes; the leader marks them."""
        over = self.finished - self.deleted
        if not over:
            return []
        needed = {
            parent
            for name, parents in self._parents.items()
            if name not in self.nodes
            for parent in parents
        }
        return sorted(over - needed)


def _put(names: set[str], name: str, among: bool) -> None:
    if among:
        names.add(name)
    else:
        names.discard(name)


class QueueReconciler:
    """Maintains the queue nodes of a broker for one term of the leader.

    A method that fails raises the error, and the next step repeats the work.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._end_text = broker.capabilities.end_position_text
        self._missing_lists = broker.capabilities.missing_lists_before_retire
        self._inventory = QueueInventory(self._end_text, self._missing_lists)
        self._names: Sequence[str] | None = None
        self._parents: dict[str, tuple[str, ...]] = {}
        # The nodes to reread in this round.
        self._round: list[str] = []
        self._excluded: frozenset[str] = frozenset()
        self._logged_waiting: set[str] = set()
        self._logged_corrupt: set[str] = set()
        self._parents_at = 0.0
        self._listed = 0

    @property
    def nodes(self) -> AbstractSet[str]:
        """The names of all known queue nodes."""
        return self._inventory.nodes

    @property
    def count(self) -> int:
        """The number of queue nodes that are not marked as deleted."""
        return len(self._inventory.nodes - self._inventory.deleted)

    def look(self, queues: LeaderQueues) -> bool:
        """Update the names of all queue nodes; return False if they are unknown."""
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
        """Record the broker's list of queues; return False if it cannot read their parents."""
        if self._listed and not names and self._missing_lists is not None:
            _log.warning(
                "the broker no longer lists any queue, after %s; retiring them after %s in a row",
                pluralize(self._listed, "queue"),
                pluralize(self._missing_lists, "such response"),
            )
        self._listed = len(names)
        if self._end_text is not None:
            # Reread the parents of waiting queues, because a new queue of the same name has other
            # parents.
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
        """Find finished queues that exist again under the same name; log new findings."""
        inventory = self._inventory
        # The leader read the finished queues before it requested this list.
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

    def reread_some(self, queues: LeaderQueues) -> None:
        """Reread the next nodes of the round, because an operator may have changed them."""
        if not self._round:
            self._round = list(self._inventory.deleted)
            if self._end_text is not None:
                self._round = list(self._inventory.nodes)
        some = self._round[:REREAD_PER_LIST]
        self._round = self._round[REREAD_PER_LIST:]
        self._read(queues, some)

    def act(self, queues: LeaderQueues, fresh: Sequence[str], now: float) -> float:
        """Update queue nodes and create nodes for `fresh`; return the seconds to the next step."""
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
            return 0.0  # exclude all together, because the rebalancer plans after each exclusion
        self._exclude_deleted(queues)
        busy = inventory.waiting or inventory.finished - inventory.deleted
        return PARENTS_SECONDS if busy else _NEVER

    def _start(self, queues: LeaderQueues, fresh: Sequence[str], now: float) -> None:
        """Create the nodes of new queues, and of queues whose parents are over."""
        inventory = self._inventory
        if self._end_text is not None:
            # The parents of all other queues are unknown until the next list.
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
            # New queues are children of this app's queues, unless the app had no queue before.
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

    def _change(
        self, queues: LeaderQueues, names: list[str], change: Change, template: str
    ) -> bool:
        """Change some nodes; return whether more nodes must change."""
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

    def _read(self, queues: LeaderQueues, names: Sequence[str]) -> None:
        for start in range(0, len(names), READ_AT_ONCE):
            some = names[start : start + READ_AT_ONCE]
            self._inventory.read(some, queues.read_queues(some))

    def _exclude_deleted(self, queues: LeaderQueues) -> None:
        # Exclude in each step, because a rebalancer that regained leadership has forgotten the
        # excluded queues.
        if self._inventory.deleted != self._excluded:
            self._excluded = frozenset(self._inventory.deleted)
        queues.exclude_deleted(self._excluded)


def _log_names(template: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        _log.info(template, pluralize(len(listed), "queue"), join_some(listed, NAMES_SHOWN))


def has_dynamic_queues(broker: Broker) -> bool:
    """Return whether queues of this broker may vanish or end."""
    can = broker.capabilities
    return can.missing_lists_before_retire is not None or can.end_position_text is not None


class Discovery(Duty):
    """Creates nodes for the broker's queues while this worker's member leads."""

    name = "discovery"

    def __init__(
        self, broker: Broker, clock: Callable[[], float], current: CurrentMember | None = None
    ) -> None:
        self._broker = broker
        self._refused: list[str] = []
        self._fault = ""
        self._clock = clock
        self._current = current if current is not None else CurrentMember()
        self._wanted = Event()
        self._leader: LeaderQueues | None = None
        self._reconciler: QueueReconciler | None = None
        # The names from the broker's lists and from workers in this term.
        self._known: set[str] = set()
        # New names from workers since the last step.
        self._fresh: set[str] = set()
        self._rejected: set[str] = set()
        self._list_at = 0.0
        self._opener = ShardOpener(broker.streams) if broker.capabilities.streams else None
        self._open_at = 0.0

    def run(self) -> None:
        while True:
            member = self._current.member
            pause = self.step(None if member is None else member.leader)
            self._wanted.wait(pause)
            self._wanted.clear()

    def names_received(self, names: Iterable[str]) -> bool:
        """Record queues that received messages; return whether any queue is new."""
        fresh = set(names) - self._known
        if self._opener is not None:
            fresh -= self._opener.hidden
        self._fresh |= fresh
        if fresh:
            self._wanted.set()
        return bool(fresh)

    def step(self, member: LeaderQueues | None) -> float:
        """Create the nodes of new queues; return the seconds until the next step."""
        if member is None or not member.is_leader():
            self._leader = self._reconciler = None
            self._fresh.clear()
            return LEADER_LOOK_SECONDS
        now = self._clock()
        if member is not self._leader:
            # Forget the queues of an earlier leader or term. Creating an existing node is harmless,
            # but no worker processes a queue without a node.
            self._leader = member
            self._known.clear()
            self._list_at = now
            self._reconciler = (
                QueueReconciler(self._broker) if has_dynamic_queues(self._broker) else None
            )
        try:
            if self._reconciler is None:
                pause = self._create(member, now)
            else:
                pause = self._reconcile(self._reconciler, member, now)
        except QdoError as error:
            text = describe(error)
            if text != self._fault:  # warn once, because an outage may last for hours
                _log.warning(
                    "cannot update the queue nodes, retrying every %g s: %s", RETRY_SECONDS, text
                )
            self._fault = text
            return RETRY_SECONDS
        self._fault = ""
        return pause

    def _create(self, queues: LeaderQueues, now: float) -> float:
        nodes = queues.queue_names()
        if nodes is None and self._broker.max_queues is not None:
            return SOON_SECONDS
        fresh = self._fresh - self._known
        lists = now >= self._list_at
        if lists:
            self._list_at = now + self._broker.catalog.list_seconds
            self._known = set(self._list() or ())
            # Of a hundred thousand names, most already have nodes.
            fresh |= self._known.difference(nodes or ())
        if self._opener is not None and (fresh or lists or now >= self._open_at):
            self._open_at = now + OPEN_SECONDS
            fresh |= self._opener.step(queues.read_queues)
            fresh -= self._opener.hidden  # `step` updated `hidden` after the names were read
            self._open_at = self._open_at if self._opener.hidden else _NEVER
        self._fresh = set()
        self._known |= fresh
        usable = self._fitting(self._usable(fresh), len(nodes or ()))
        if usable:
            queues.create_queues(usable)
        return max(SOON_SECONDS, min(self._list_at, self._open_at) - now)

    def _reconcile(self, reconciler: QueueReconciler, queues: LeaderQueues, now: float) -> float:
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
            # Intern the names to save memory, because other parts also keep them.
            return list(map(sys.intern, self._broker.catalog.names()))
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "cannot list the broker's queues, retrying in %g s: %s",
                self._broker.catalog.list_seconds,
                describe(error),
            )
            return None

    def _fitting(self, names: list[str], count: int) -> list[str]:
        """Return the new queues that get a node; the `count` existing nodes use up `max_queues`."""
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
        problems = {name: name_error(name) for name in sorted(names)}
        new = [name for name, each in problems.items() if each and name not in self._rejected]
        if new:
            self._rejected.update(new)
            _log.error(
                "%s not processed, because no znode can have such a name: %s; send to queues with"
                " other names",
                "1 new queue is" if len(new) == 1 else f"{len(new)} new queues are",
                join_some([f"{name!r} ({problems[name]})" for name in new], NAMES_SHOWN),
            )
        return [name for name, each in problems.items() if each is None]
