"""The elected rebalancer: it observes workers, publishes plans and creates queue nodes. No I/O.

The rebalancer provides balance and liveness, but not safety. A published plan is only a proposal,
because workers take queues only by compare-and-swap. Every transaction of the rebalancer checks the
leader's fence.

When a worker is gone or new queues appear, the rebalancer plans at once. When a worker has joined,
the rebalancer waits a moment, to avoid a plan for each worker while a fleet starts. After its
election, after every reconnection, and once a minute, the rebalancer reads all nodes again and
plans.

The leader creates missing queue nodes. Workers must notice the deletion of queue nodes. The
versions of a recreated node start at 0, so a late claim could find the same version as in the
former node. Therefore each deletion also writes the folder `queues`. Each claim checks that the
folder still has the version that it had before the read of the queue nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.assignments import RETRY_SECONDS, Assignments, FencedCommit
from qdo.coordination.protocol.planner import plan_filtered
from qdo.coordination.protocol.worker_roll import LostWorkers, WorkerRoll
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode, parse_moves
from qdo.text import pluralize

log = logging.getLogger(__name__)
CREATE_BATCH = 250
INFINITY = float("inf")
Read: TypeAlias = m.Get | m.Stat | m.Children
# The time without further joins that the leader waits for after a worker joined.
SETTLE_SECONDS = 0.15
# The maximum time of this wait, from the first join.
MAX_SETTLE_SECONDS = 1.0
# The minimum time between two listings of all queues.
RELIST_SECONDS = 0.05
RECONCILE_SECONDS = 60.0


class QueueNodes:
    """The queue nodes in the last listing, and the nodes to create."""

    def __init__(self, layout: Layout, commit: FencedCommit) -> None:
        # The names of all queue nodes, and of the nodes marked as deleted; None while unknown.
        self.listed: tuple[str, ...] | None = None
        self.deleted: frozenset[str] | None = None
        self._layout = layout
        self._commit = commit
        self._missing: dict[str, int] = {}
        self._creating: dict[str, int] = {}

    def relist(self) -> None:
        """Forget the listing; after the next listing, repeat the pending creations."""
        self._missing |= self._creating
        self._creating = {}
        self.listed = None

    def end_term(self) -> None:
        self._missing = {}
        self._creating = {}
        self.listed = None

    def record_listing(self, names: tuple[str, ...]) -> None:
        self.listed = names
        self._created(names)
        self.create_missing()

    def planned(self, assigned: Callable[[], Container[str]]) -> Sequence[str]:
        """Return the queues to distribute; `assigned` returns the already assigned queues."""
        listed = self.listed or ()
        deleted = self.deleted
        # While the names of deleted queues are unknown, plan no new queues.
        if deleted is None:
            known = assigned()
            return [queue for queue in listed if queue in known]
        # Omit deleted queues, because they have no work but would count as load.
        return [queue for queue in listed if queue not in deleted] if deleted else listed

    def want(self, names: Iterable[str], last: int) -> None:
        self._missing.update(dict.fromkeys(names, last))

    def create_missing(self) -> None:
        if self.listed is None:
            return  # the next listing calls this again
        missing = self._missing
        self._missing = {}
        new = sorted(set(missing).difference(self.listed, self._creating))
        for start in range(0, len(new), CREATE_BATCH):
            self._create({name: missing[name] for name in new[start : start + CREATE_BATCH]})

    def _create(self, lasts: dict[str, int]) -> None:
        self._creating.update(lasts)
        ops = tuple(
            m.CreateOp(self._layout.queue(name), QueueNode(last=last).encode())
            for name, last in lasts.items()
        )
        self._commit(ops, lambda answer: self._create_answered(lasts, answer))

    def _create_answered(self, lasts: dict[str, int], answer: m.Response) -> None:
        self._created(lasts)
        names = list(lasts)
        if not isinstance(answer, m.Rejected) or answer.fault is m.CommitError.NO_NODE:
            return  # created, or requested again when the folder `queues` exists
        if answer.fault is not m.CommitError.NODE_EXISTS:
            log.error(
                "rebalancer: queue %r gets no node, and its messages wait: %s; correct the rights"
                " with `qdo admin acl apply`",
                names[answer.index - 1],
                answer.reason or answer.fault.value,
            )
        rest = {name: lasts[name] for at, name in enumerate(names, start=1) if at != answer.index}
        if rest:
            self._create(rest)

    def _created(self, names: Iterable[str]) -> None:
        for name in names:
            self._creating.pop(name, None)
        if not self._creating:
            self._creating = {}  # releases memory; dicts never shrink by themselves


class Rebalancer(m.Machine):
    """The work of the leader. On all other workers, the rebalancer is idle.

    :ivar lost: the workers that are gone without releasing their queues.
    :param wait_for_deleted: until a call of `exclude_deleted`, plan only queues that are assigned.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        clock: Callable[[], float],
        resign: Callable[[str], None],
        wait_for_deleted: bool = False,
    ) -> None:
        super().__init__()
        self._wait_for_deleted = wait_for_deleted
        self._layout = layout
        self._clock = clock
        self._resign = resign
        self._up = False
        self._fence: int | None = None
        self._term = 0
        self._moves: dict[str, str] = {}
        self._assignments = Assignments(
            layout, commit=self._fenced, observe=self._observe, on_conflict=self._reconcile
        )
        self._queue_nodes = QueueNodes(layout, self._fenced)
        self._roll = WorkerRoll(clock)
        self.lost = LostWorkers(layout, clock, self._observe)
        self._clear()

    def _clear(self) -> None:
        """Forget the observed workers and all planned times."""
        self._roll.clear()
        self._unread = 0
        self._settled = False
        self._plan_at = self._joined_at = INFINITY
        self._relist_at = self._reconcile_at = INFINITY

    # --- leadership -------------------------------------------------------------------

    def leadership_acquired(self, fence: int, former: str, process: str) -> None:
        """Begin a term; the former leader was `former`, and ran in `process`."""
        self._fence = fence
        self.lost.record({former: WorkerNode(process=process)})
        self._queue_nodes.deleted = None if self._wait_for_deleted else frozenset()
        self._reconcile()

    def leadership_lost(self) -> None:
        self._fence = None
        self._term += 1
        self._roll.end_term()
        self.lost.end_term()
        self._assignments.end_term()
        self._queue_nodes.end_term()
        self._clear()

    @property
    def leading(self) -> bool:
        return self._fence is not None

    def connected(self) -> None:
        self._up = True
        if self.leading:
            self._reconcile()

    def suspended(self) -> None:
        self._up = False

    def due(self) -> float:
        if not self.leading or not self._up:
            return INFINITY
        blocked = self._assignments.publishing or self._unread
        plan_at = INFINITY if blocked else min(self._plan_at, self._roll.judge_at)
        return min(plan_at, self._relist_at, self._reconcile_at)

    def tick(self) -> None:
        now = self._clock()
        if not self.leading or not self._up:
            return
        if now >= self._reconcile_at:
            self._reconcile()
        if now >= self._relist_at:
            self._relist_at = INFINITY
            self._list_queues()
        if not self._unread:  # an unread worker would seem to claim its queues
            for name, queue in self._roll.judge(self._assignments.share).items():
                self._judge(name, queue)
        if now >= self._plan_at:
            self._publish()

    def changed(self, path: str) -> None:
        if not self.leading or not self._up:
            return
        if path == self._layout.workers:
            self._list_workers()
        elif path == self._layout.queues:
            self._relist_at = min(self._relist_at, self._clock() + RELIST_SECONDS)
        elif path.startswith(f"{self._layout.workers}/"):
            self._read_worker(path.rpartition("/")[2])
        elif path == self._layout.assignments:
            self._read_moves()
        elif path.startswith(f"{self._layout.assignments}/"):
            self._assignments.check(path.rpartition("/")[2])

    def _judge(self, name: str, queue: str) -> None:
        """Set aside a worker that claims no queues, unless its queue is only deleted."""

        def answered(answer: m.Response) -> None:
            if isinstance(answer, m.NodeRead) and QueueNode.parse(answer.data).deleted:
                if (known := self._queue_nodes.deleted) is not None:
                    self.exclude_deleted(known | {queue})
            elif name in self._roll.workers and not self._roll.workers[name].queues:
                self._roll.set_aside(name, len(self._assignments.share(name)))
                self._plan_soon(0.0)

        self._observe(m.Get(self._layout.queue(queue)), answered)

    # --- observing --------------------------------------------------------------------

    def _observe(self, request: Read, then: m.Callback) -> None:
        """Send a read; ignore the answer after the end of this term."""
        term = self._term

        def answered(answer: m.Response) -> None:
            if term != self._term or isinstance(answer, m.NoResponse):
                return
            if isinstance(answer, m.Refused) and isinstance(request, m.Children):
                self._roll.report_unlisted(request.path, answer.reason)
                self._reconcile_at = min(self._reconcile_at, self._clock() + RETRY_SECONDS)
            else:
                then(answer)

        self.ask(request, answered)

    def _expect(self, request: Read, then: m.Callback) -> None:
        """Send a read like `_observe`, and make no plan before the answer."""

        def answered(answer: m.Response) -> None:
            self._unread -= 1
            then(answer)

        self._unread += 1
        self._observe(request, answered)

    def _reconcile(self) -> None:
        """Read all nodes again, and then plan."""
        self._term += 1
        self._assignments.forget()
        self._queue_nodes.relist()
        self._clear()
        self._reconcile_at = self._clock() + RECONCILE_SECONDS
        self._list_workers()
        self._list_queues()
        self._expect(m.Children(self._layout.assignments), self._assignments_listed)
        self._read_moves()

    def _list_workers(self) -> None:
        self._expect(m.Children(self._layout.workers, watch=True), self._workers_listed)

    def _workers_listed(self, answer: m.Response) -> None:
        first = not self._roll.listed
        new, left = self._roll.record(answer.names if isinstance(answer, m.ChildrenRead) else ())
        self.lost.record(left)
        for name in new:
            self._read_worker(name, is_new=True)
        if first or left:
            self._plan_soon(0.0)
        elif new:
            self._settle()

    def _read_worker(self, name: str, is_new: bool = False) -> None:
        read = self._expect if is_new else self._observe
        read(
            m.Get(self._layout.worker(name), watch=True),
            lambda answer: self._worker_read(name, is_new, answer),
        )

    def _worker_read(self, name: str, is_new: bool, answer: m.Response) -> None:
        before, after = self._roll.read(name, answer)
        if before is None or after is None:
            return
        # For a new worker, plan when no other workers have joined for a moment.
        filter_changed = not is_new and after.filter != before.filter
        if after.draining != before.draining or filter_changed:
            self._plan_soon(0.0)

    def _list_queues(self) -> None:
        self._expect(m.Children(self._layout.queues, watch=True), self._queues_listed)

    def _queues_listed(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeMissing):
            self._recreate(self._layout.queues)
            self._queue_nodes.listed = ()
            self._relist_at = self._clock() + RELIST_SECONDS
        if isinstance(answer, m.ChildrenRead):
            if set(answer.names) != set(self._queue_nodes.listed or ()):
                self._plan_soon(0.0)
            self._queue_nodes.record_listing(answer.names)

    def _assignments_listed(self, answer: m.Response) -> None:
        if isinstance(answer, m.NodeMissing):
            self._recreate(self._layout.assignments)
        listed = answer.names if isinstance(answer, m.ChildrenRead) else ()
        for worker in filter(is_worker_name, listed):
            self._assignments.read(worker, self._expect)

    def _read_moves(self) -> None:
        self._expect(m.Get(self._layout.assignments, watch=True), self._moves_read)

    def _moves_read(self, answer: m.Response) -> None:
        found = parse_moves(answer.data) if isinstance(answer, m.NodeRead) else {}
        if found != self._moves:
            self._moves = found
            self._plan_soon(0.0)

    def _recreate(self, path: str) -> None:
        """Create a deleted folder again, because the leader needs it to assign queues."""
        log.warning("rebalancer: %s was deleted; recreating it to assign queues again", path)
        self._fenced((m.CreateOp(path, b""),), lambda answer: None)

    # --- planning ---------------------------------------------------------------------

    def _plan_soon(self, delay_seconds: float) -> None:
        self._plan_at = min(self._plan_at, self._clock() + delay_seconds)

    def _settle(self) -> None:
        """After a join, wait until no further workers join, but only for a limited time."""
        now = self._clock()
        self._joined_at = min(self._joined_at, now)
        self._plan_at = min(now + SETTLE_SECONDS, self._joined_at + MAX_SETTLE_SECONDS)

    def _publish(self) -> None:
        """Make a plan, and write the changed assignments under the fence."""
        if not self._roll.listed or self._queue_nodes.listed is None:
            return
        workers = self._roll.workers
        if self._assignments.publishing or self._unread:
            return
        current = self._assignments.current(workers)
        if not self._settled and not any(current.values()):
            self._settle()  # the fleet is starting, so wait for the other workers
            self._settled = True
            return
        self._settled = True
        self._plan_at = self._joined_at = INFINITY
        able = self._roll.able(self._assignments.writable)
        if not able:
            return
        queues = self._queue_nodes.planned(self._assignments.queues)
        wanted, unmatched = plan_filtered(queues, able, current, self._moves)
        self._roll.report_unmatched(sorted(unmatched))
        self.lost.examine(self._assignments.shares_of_others(workers))
        changes = self._assignments.changes(workers, wanted)
        if changes:
            log.info(
                "rebalancer: %s over %s, with %s",
                pluralize(len(queues), "queue"),
                pluralize(len(able), "worker"),
                pluralize(len(changes), "changed assignment"),
            )
            self._assignments.write(changes)

    # --- publishing -------------------------------------------------------------------

    def _fenced(self, ops: tuple[m.Op, ...], then: m.Callback) -> None:
        """Commit under the fence; resign if the fence has changed or the answer is lost."""
        term = self._term

        def answered(answer: m.Response) -> None:
            if term != self._term:
                return
            if isinstance(answer, m.NoResponse):
                self._resign("a transaction of the rebalancer was not answered")
            elif isinstance(answer, m.Rejected) and answer.index == 0:
                self._resign("another worker has become leader")
            else:
                then(answer)

        self.ask(m.Commit((m.CheckOp(self._layout.rebalancer, self._fence or 0), *ops)), answered)

    # --- called by the leader's discovery of queues -----------------------------------

    @property
    def workers(self) -> frozenset[str]:
        """The workers that the leader knows; empty on other workers."""
        return frozenset(self._roll.workers if self.leading else ())

    @property
    def queues(self) -> tuple[str, ...] | None:
        return self._queue_nodes.listed if self.leading else None

    def exclude_deleted(self, names: frozenset[str]) -> None:
        """Exclude exactly these queues from assignment; do nothing if this worker does not lead."""
        if self.leading and names != self._queue_nodes.deleted:
            self._queue_nodes.deleted = names
            self._plan_soon(0.0)

    def create_queues(self, names: Iterable[str], last: int = 0) -> None:
        """Create the nodes of new queues, which start after `last`; only the leader does this."""
        if self.leading:
            self._queue_nodes.want(names, last)
            if self._up:
                self._queue_nodes.create_missing()
