"""The elected rebalancer: observe, plan, publish. A state machine without I/O.

It gives balance and liveness, never safety: what it publishes is a wish, and workers take
queues by compare-and-swap only. Every transaction checks the leader's fence.

When it plans: at once after a worker is gone, for its queues are orphans; at once after new
queues; a moment after a worker joined, for a fleet that starts up must not be rebalanced once
per worker; and from scratch after taking office, after every reconnection and once a minute,
for a missed event is how such systems stall. On any doubt it resigns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from qdo.coordination.filtered_planner import plan_filtered
from qdo.coordination.layout import (
    MAX_TRANSACTION_BYTES,
    MAX_VALUE_BYTES,
    Layout,
    QueueNode,
    WorkerNode,
    encode_queues,
    is_worker_name,
    parse_assignment,
)
from qdo.coordination.machine import (
    Answer,
    CheckOp,
    Children,
    Commit,
    Committed,
    CreateOp,
    DeleteOp,
    Fault,
    Get,
    Listing,
    Machine,
    Node,
    NoNode,
    Op,
    Refused,
    SetOp,
    Unanswered,
)

log = logging.getLogger(__name__)

INFINITY = float("inf")
SETTLE_SECONDS = 0.15
"""Quiet time wanted after a worker joined."""
MAX_SETTLE_SECONDS = 1.0
"""Longest wait for it, counted from the first join."""
RELIST_SECONDS = 0.05
"""Shortest time between two listings of all queues."""
RECONCILE_SECONDS = 60.0
CREATE_BATCH = 250
NAMES_SHOWN = 20


class Rebalancer(Machine):
    """What the leader does while it leads; idle otherwise.

    :param told_aside: somebody reads which queues are marked as deleted and says it with
        `set_aside`. Until then only queues are planned that somebody has been granted.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        clock: Callable[[], float],
        resign: Callable[[str], None],
        told_aside: bool = False,
    ) -> None:
        super().__init__()
        self._told_aside = told_aside
        self._aside: frozenset[str] | None = None
        self._layout = layout
        self._clock = clock
        self._resign = resign
        self._up = False
        self._fence: int | None = None
        self._term = 0
        self._refusing: set[str] = set()
        self._untaken: list[str] = []
        self._clear()

    def _clear(self) -> None:
        """Forget everything observed."""
        self._workers: dict[str, WorkerNode] | None = None
        self._queues: tuple[str, ...] | None = None
        self._assigned: dict[str, tuple[frozenset[str], int]] = {}
        self._stale: dict[str, int] = {}
        self._unread = 0
        self._publishing = False
        self._settled = False
        self._plan_at = INFINITY
        self._joined_at = INFINITY
        self._relist_at = INFINITY
        self._reconcile_at = INFINITY
        self._creating: dict[str, int] = {}
        self._missing: dict[str, int] = {}

    # --- office -----------------------------------------------------------------------

    def elected(self, fence: int) -> None:
        """Begin; `fence` is the version that taking office left on the rebalancer node."""
        self._fence = fence
        self._aside = None if self._told_aside else frozenset()
        self._reconcile()

    def deposed(self) -> None:
        """Stop; nothing observed is kept for another term."""
        self._fence = None
        self._term += 1
        self._refusing.clear()
        self._untaken = []
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
        blocked = self._publishing or self._unread
        return min(
            INFINITY if blocked else self._plan_at, self._relist_at, self._reconcile_at
        )

    def tick(self) -> None:
        now = self._clock()
        if not self.leading or not self._up:
            return
        if now >= self._reconcile_at:
            self._reconcile()
        if now >= self._relist_at:
            self._relist_at = INFINITY
            self._list_queues()
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

    # --- observing --------------------------------------------------------------------

    def _observe(self, request: Get | Children, then: Callable[[Answer], None]) -> None:
        """Ask for something whose answer counts only in this term."""
        term = self._term

        def answered(answer: Answer) -> None:
            if term == self._term and not isinstance(answer, Unanswered):
                then(answer)

        self.ask(request, answered)

    def _reconcile(self) -> None:
        """Read everything afresh, then plan."""
        missing = self._missing | self._creating
        self._term += 1
        self._clear()
        self._missing = missing
        self._reconcile_at = self._clock() + RECONCILE_SECONDS
        self._list_workers()
        self._list_queues()
        self._unread += 1
        self._observe(Children(self._layout.assignments), self._assignments_listed)

    def _list_workers(self) -> None:
        self._unread += 1
        self._observe(Children(self._layout.workers, watch=True), self._workers_listed)

    def _workers_listed(self, answer: Answer) -> None:
        self._unread -= 1
        listed = answer.names if isinstance(answer, Listing) else ()
        # What another tool put there takes no queues, and must be granted none.
        names = set(filter(is_worker_name, listed))
        first = self._workers is None
        known = self._workers or {}
        self._workers = {name: node for name, node in known.items() if name in names}
        for name in sorted(names - known.keys()):
            self._unread += 1
            self._workers[name] = WorkerNode()
            self._read_worker(name, counted=True)
        if first or known.keys() - names:
            self._plan_soon(0.0)
        elif names - known.keys():
            self._settle()

    def _read_worker(self, name: str, counted: bool = False) -> None:
        self._observe(
            Get(self._layout.worker(name), watch=True),
            lambda answer: self._worker_read(name, counted, answer),
        )

    def _worker_read(self, name: str, counted: bool, answer: Answer) -> None:
        self._unread -= counted
        workers = self._workers
        if workers is None or name not in workers or not isinstance(answer, Node):
            return
        before, workers[name] = workers[name], WorkerNode.parse(answer.data)
        # A node just listed is planned for once the others that join have settled.
        other_takes = not counted and workers[name].takes != before.takes
        if workers[name].draining != before.draining or other_takes:
            self._plan_soon(0.0)

    def _list_queues(self) -> None:
        self._unread += 1
        self._observe(Children(self._layout.queues, watch=True), self._queues_listed)

    def _queues_listed(self, answer: Answer) -> None:
        self._unread -= 1
        if isinstance(answer, NoNode):
            self._restore(self._layout.queues)
            self._queues = ()
            self._relist_at = self._clock() + RELIST_SECONDS
        if isinstance(answer, Listing):
            if set(answer.names) != set(self._queues or ()):
                self._plan_soon(0.0)
            self._queues = answer.names
            self._created(answer.names)
            self._create_missing()

    def _assignments_listed(self, answer: Answer) -> None:
        self._unread -= 1
        if isinstance(answer, NoNode):
            self._restore(self._layout.assignments)
        for worker in filter(is_worker_name, answer.names if isinstance(answer, Listing) else ()):
            self._unread += 1
            self._read_assignment(worker)

    def _restore(self, path: str) -> None:
        """Make a folder again that somebody deleted: without it nothing can be granted."""
        log.warning("rebalancer: %s is gone and is made again", path)
        self._fenced((CreateOp(path, b""),), lambda answer: None)

    def _read_assignment(self, worker: str) -> None:
        def read(answer: Answer) -> None:
            self._unread -= 1
            if isinstance(answer, Node):
                self._assigned[worker] = (parse_assignment(answer.data), answer.version)

        self._observe(Get(self._layout.assignment(worker)), read)

    # --- planning ---------------------------------------------------------------------

    def _plan_soon(self, delay_seconds: float) -> None:
        self._plan_at = min(self._plan_at, self._clock() + delay_seconds)

    def _settle(self) -> None:
        """Wait for quiet after a join, but not for ever."""
        now = self._clock()
        self._joined_at = min(self._joined_at, now)
        self._plan_at = min(now + SETTLE_SECONDS, self._joined_at + MAX_SETTLE_SECONDS)

    def _publish(self) -> None:
        """Plan, and write the assignments that change, fenced."""
        if self._publishing or self._unread or self._workers is None or self._queues is None:
            return
        current = self._current()
        if not self._settled and not any(current.values()):
            self._settle()  # a fleet that starts up: let the others arrive
            self._settled = True
            return
        self._settled = True
        self._plan_at = self._joined_at = INFINITY
        able = {name: node.takes for name, node in self._workers.items() if not node.draining}
        if not able:
            return
        queues = self._planned()
        wanted, untaken = plan_filtered(queues, able, current)
        self._tell_untaken(sorted(untaken))
        ops = self._operations(wanted)
        if ops:
            log.info(
                "rebalancer: %d queues over %d workers, %d assignments change",
                len(queues),
                len(able),
                len(ops),
            )
            self._write(ops)

    def _planned(self) -> Sequence[str]:
        """Return the queues to share out.

        One marked as deleted would count as the share of a worker that has nothing to do.
        """
        queues, aside = self._queues or (), self._aside
        if aside is None:
            granted = {queue for share, _ in self._assigned.values() for queue in share}
            return [queue for queue in queues if queue in granted]
        return [queue for queue in queues if queue not in aside] if aside else queues

    def _tell_untaken(self, untaken: list[str]) -> None:
        """Name the queues that no worker takes, whenever they are others than before."""
        if untaken == self._untaken:
            return
        if untaken:
            shown = ", ".join(untaken[:NAMES_SHOWN])
            log.warning(
                "rebalancer: no worker takes %d queues, their messages wait for one with other "
                "--queues or --exclude: %s%s",
                len(untaken),
                shown,
                "" if len(untaken) <= NAMES_SHOWN else ", ...",
            )
        else:
            log.info("rebalancer: every queue has a worker that takes it again")
        self._untaken = untaken

    def _current(self) -> dict[str, list[str]]:
        """What each worker was granted, or without a grant what it has."""
        workers = self._workers or {}
        granted = {name for name in workers if name in self._assigned}
        current = {name: sorted(self._assigned[name][0]) for name in granted}
        taken = {queue for name in granted for queue in self._assigned[name][0]}
        for name in workers.keys() - granted:
            current[name] = [queue for queue in workers[name].queues if queue not in taken]
        return current

    def _operations(self, wanted: dict[str, list[str]]) -> list[tuple[str, frozenset[str], Op]]:
        """Return what to write: gainers first, so that they watch before others let go."""
        changes: list[tuple[int, str, frozenset[str], Op]] = []
        for worker in (self._workers or {}).keys() | self._assigned.keys():
            path = self._layout.assignment(worker)
            had, version = self._assigned.get(worker, (frozenset(), -1))
            if worker in self._refusing:
                continue
            if worker not in (self._workers or {}):
                changes.append((2, worker, had, DeleteOp(path, version)))
                continue
            share = frozenset(wanted.get(worker, ()))
            if share == had and version >= 0:
                continue
            data = self._fitting(worker, share)
            op: Op = SetOp(path, data, version) if version >= 0 else CreateOp(path, data)
            changes.append((int(not share - had), worker, share, op))
        changes.sort(key=lambda change: change[:2])
        return [(worker, share, op) for _, worker, share, op in changes]

    def _fitting(self, worker: str, share: frozenset[str]) -> bytes:
        """Return the value of an assignment, cut to what a node can hold."""
        data = encode_queues(share)
        if len(data) <= MAX_VALUE_BYTES:
            return data
        names = sorted(share)
        fits = len(names) * MAX_VALUE_BYTES // len(data) * 9 // 10
        log.error(
            "rebalancer: %d queues for %s do not fit into one node; %d of them are nobody's: "
            "start more workers",
            len(names),
            worker,
            len(names) - fits,
        )
        return encode_queues(names[:fits])

    # --- publishing -------------------------------------------------------------------

    def _write(self, ops: list[tuple[str, frozenset[str], Op]]) -> None:
        """Send the first transaction of `ops`; the rest follows its answer."""
        size = 0
        batch: list[tuple[str, frozenset[str], Op]] = []
        for worker, share, op in ops:
            size += len(getattr(op, "data", b"")) + len(op.path) + 64
            if batch and size > MAX_TRANSACTION_BYTES:
                break
            batch.append((worker, share, op))
        rest = ops[len(batch) :]
        self._publishing = True
        self._fenced(
            tuple(op for _, _, op in batch), lambda answer: self._written(batch, rest, answer)
        )

    def _fenced(self, ops: tuple[Op, ...], then: Callable[[Answer], None]) -> None:
        """Commit under the fence; whatever shows that we may not lead any more ends the term."""
        term = self._term

        def answered(answer: Answer) -> None:
            if term != self._term:
                return
            if isinstance(answer, Unanswered):
                self._resign("a transaction of the rebalancer was not answered")
            elif isinstance(answer, Refused) and answer.index == 0:
                self._resign("another rebalancer has taken office")
            else:
                then(answer)

        self.ask(Commit((CheckOp(self._layout.rebalancer, self._fence or 0), *ops)), answered)

    def _written(
        self,
        batch: list[tuple[str, frozenset[str], Op]],
        rest: list[tuple[str, frozenset[str], Op]],
        answer: Answer,
    ) -> None:
        self._publishing = False
        if not isinstance(answer, Committed):
            if isinstance(answer, Refused) and answer.fault is Fault.OTHER:
                self._leave_alone(batch[answer.index - 1][0])
            self._reconcile()
            return
        for (worker, share, op), version in zip(batch, answer.versions[1:], strict=True):
            if isinstance(op, DeleteOp):
                self._assigned.pop(worker, None)
            else:
                self._assigned[worker] = (share, version)
        if rest:
            self._write(rest)

    def _leave_alone(self, worker: str) -> None:
        """Write this assignment no more: one that is refused would keep back all the others."""
        self._refusing.add(worker)
        log.error(
            "rebalancer: %s cannot be written or deleted and is left alone",
            self._layout.assignment(worker),
        )

    # --- queues that brokers know and the coordinator does not ------------------------

    @property
    def queues(self) -> tuple[str, ...] | None:
        """The names of all queue nodes as last listed, None where they are not known now."""
        return self._queues if self.leading else None

    def set_aside(self, names: frozenset[str]) -> None:
        """Grant these queues to nobody, and all others as before; others pass it over."""
        if self.leading and names != self._aside:
            self._aside = names
            self._plan_soon(0.0)

    def create_queues(self, names: Iterable[str], last: int = 0) -> None:
        """Create the nodes of new queues, as leader; others pass it over.

        :param last: where they begin.
        """
        if self.leading:
            self._missing.update(dict.fromkeys(names, last))
            self._create_missing()

    def _create_missing(self) -> None:
        if self._queues is None or not self._up:
            return  # the next listing comes back to it
        missing, self._missing = self._missing, {}
        new = sorted(set(missing).difference(self._queues, self._creating))
        for start in range(0, len(new), CREATE_BATCH):
            self._create({name: missing[name] for name in new[start : start + CREATE_BATCH]})

    def _create(self, lasts: dict[str, int]) -> None:
        self._creating.update(lasts)
        ops = tuple(
            CreateOp(self._layout.queue(name), QueueNode(last=last).encode())
            for name, last in lasts.items()
        )
        self._fenced(ops, lambda answer: self._queues_created(lasts, answer))

    def _created(self, names: Iterable[str]) -> None:
        for name in names:
            self._creating.pop(name, None)
        if not self._creating:
            self._creating = {}  # a dict does not become smaller by itself

    def _queues_created(self, lasts: dict[str, int], answer: Answer) -> None:
        self._created(lasts)
        names = list(lasts)
        if not isinstance(answer, Refused) or answer.fault is Fault.NO_NODE:
            return  # created; or discovery asks again once `queues` stands again
        if answer.fault is not Fault.NODE_EXISTS:
            log.error("rebalancer: no node for queue %r: refused", names[answer.index - 1])
        rest = {name: lasts[name] for at, name in enumerate(names, start=1) if at != answer.index}
        if rest:
            self._create(rest)
