"""The assignments of workers: the leader writes all assignments, and each worker reads its own.

The leader watches each assignment for changes by other programs. Without the watches, a worker
would release the removed queues, and no worker would take them until the leader reads all nodes
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from qdo.coordination.protocol import machine as m
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import MAX_TRANSACTION_BYTES, MAX_VALUE_BYTES
from qdo.coordination.znodes.worker_node import WorkerNode, encode_queues, parse_assignment
from qdo.text import pluralize

log = logging.getLogger(__name__)
# A worker, its new assigned queues, and the operation that writes them.
Change: TypeAlias = tuple[str, frozenset[str], m.Op]
# A function that commits operations under the leader's fence, and passes the answer to the
# callback.
FencedCommit: TypeAlias = Callable[[tuple[m.Op, ...], m.Callback], None]
# A function that sends a read, and ignores the answer if the present term has ended.
Observe: TypeAlias = Callable[[m.Get | m.Stat, m.Callback], None]
# The pause before a worker reads a refused assignment again. No watch fires when an ACL changes.
RETRY_SECONDS = 15.0
# The pause before a worker reads any other assignment again. Newer ZooKeeper servers do not report
# a deletion to clients that may not read the node. So the worker may not notice a replacement.
REREAD_SECONDS = 60.0


class Assignments:
    """The assignment nodes that the leader has read or written in this term."""

    def __init__(
        self,
        layout: Layout,
        *,
        commit: FencedCommit,
        observe: Observe,
        on_conflict: Callable[[], None],
    ) -> None:
        self.publishing = False  # a transaction is in flight
        self._layout = layout
        self._commit = commit
        self._observe = observe
        # A function to call when the nodes differ from the remembered nodes.
        self._on_conflict = on_conflict
        self._assigned: dict[str, tuple[frozenset[str], int]] = {}
        self._unwritable: set[str] = set()
        self._protected: set[str] = set()
        self._garbage: dict[str, int] = {}

    def forget(self) -> None:
        """Drop all cached data, before the leader reads all nodes again."""
        self._assigned = {}
        self._garbage = {}
        self.publishing = False

    def end_term(self) -> None:
        """Drop all cached data, even about unwritable nodes."""
        self._unwritable.clear()
        self._protected.clear()
        self.forget()

    def writable(self, worker: str) -> bool:
        """Return whether the leader can change the assignment of a worker."""
        return worker not in self._unwritable

    def read(self, worker: str, observe: Observe) -> None:
        """Read an assignment node and watch it."""

        def answered(answer: m.Response) -> None:
            if isinstance(answer, m.NodeRead):
                share = parse_assignment(answer.data)
                if share is None:
                    self._garbage[worker] = answer.version
                else:
                    self._assigned[worker] = (share, answer.version)
            elif isinstance(answer, m.Refused):
                self._protected.add(worker)

        observe(m.Get(self._layout.assignment(worker), watch=True), answered)

    def check(self, worker: str) -> None:
        """Watch an assignment node again; report a conflict if this term did not write it."""

        def answered(answer: m.Response) -> None:
            if self.publishing or worker not in self._assigned:
                return  # wait for the outcome of the transaction
            version = answer.version if isinstance(answer, m.NodeRead) else None
            if version != self._assigned[worker][1]:
                log.warning(
                    "rebalancer: another program changed %s; writing the assignment again",
                    self._layout.assignment(worker),
                )
                self._on_conflict()

        self._observe(m.Stat(self._layout.assignment(worker), watch=True), answered)

    def queues(self) -> set[str]:
        return {queue for share, _ in self._assigned.values() for queue in share}

    def share(self, worker: str) -> frozenset[str]:
        return self._assigned.get(worker, (frozenset[str](), 0))[0]

    def shares_of_others(self, workers: Collection[str]) -> dict[str, frozenset[str]]:
        """Return the queues assigned to each worker that is not in `workers`."""
        return {name: each for name, (each, _) in self._assigned.items() if name not in workers}

    def current(self, workers: Mapping[str, WorkerNode]) -> dict[str, list[str]]:
        """Return the assignment of each worker; without an assignment, the queues in its node."""
        return present_shares({name: found[0] for name, found in self._assigned.items()}, workers)

    # --- writing ----------------------------------------------------------------------

    def changes(
        self, workers: Mapping[str, WorkerNode], wanted: Mapping[str, list[str]]
    ) -> list[Change]:
        """Return the changes that make the assignments equal to a plan."""
        changes: list[tuple[int, str, frozenset[str], m.Op]] = []
        nodes = self._assigned.keys() | self._garbage.keys() | self._protected
        for worker in workers.keys() | nodes:
            path = self._layout.assignment(worker)
            unknown = (frozenset[str](), self._garbage.get(worker, -1))
            had, version = self._assigned.get(worker, unknown)
            if worker in self._unwritable:
                continue
            if worker not in workers:
                changes.append((2, worker, had, m.DeleteOp(path, version)))
                continue
            share = frozenset(wanted.get(worker, ()))
            replaced = worker in self._protected
            kept = version >= 0 and not replaced and worker not in self._garbage
            if share == had and kept:
                continue
            share, data = _fitting(worker, share, had)
            if share == had and kept:
                continue
            if replaced:  # a new node only needs rights on its folder
                changes.append((0, worker, had, m.DeleteOp(path)))
                changes.append((0, worker, share, m.CreateOp(path, data)))
                continue
            op: m.Op = m.SetOp(path, data, version) if version >= 0 else m.CreateOp(path, data)
            changes.append((int(not share - had), worker, share, op))
        # Write workers that gain queues first, because they must watch before other workers
        # release.
        changes.sort(key=lambda change: change[:2])
        return [(worker, share, op) for _, worker, share, op in changes]

    def write(self, changes: list[Change]) -> None:
        """Send the first transaction of the changes; after its answer, send the others."""
        size = 0
        batch: list[Change] = []
        for worker, share, op in changes:
            size += len(getattr(op, "data", b"")) + len(op.path) + 64
            if batch and size > MAX_TRANSACTION_BYTES:
                break
            batch.append((worker, share, op))
        rest = changes[len(batch) :]
        self.publishing = True
        self._commit(
            tuple(op for _, _, op in batch), lambda answer: self._written(batch, rest, answer)
        )

    def _written(self, batch: list[Change], rest: list[Change], answer: m.Response) -> None:
        self.publishing = False
        if not isinstance(answer, m.Committed):
            if isinstance(answer, m.Rejected):
                change = batch[answer.index - 1]
                if answer.fault is m.CommitError.OTHER:
                    self._refused(*change, answer.reason)
                else:
                    self._protected.discard(change[0])
            self._on_conflict()
            return
        for (worker, share, op), version in zip(batch, answer.versions[1:], strict=True):
            self._protected.discard(worker)
            self._garbage.pop(worker, None)
            if isinstance(op, m.DeleteOp):
                self._assigned.pop(worker, None)
                continue
            self._assigned[worker] = (share, version)
            if isinstance(op, m.CreateOp):
                self.check(worker)
        if rest:
            self.write(rest)

    def _refused(self, worker: str, share: frozenset[str], op: m.Op, reason: str) -> None:
        """Replace an assignment node that is unwritable; if this fails too, leave the node."""
        # If the leader retried a rejected assignment forever, it would block all others.
        if isinstance(op, m.SetOp):
            self._protected.add(worker)
            log.warning("rebalancer: replacing %s: %s", op.path, reason)
            return
        self._unwritable.add(worker)
        log.error(
            "rebalancer: cannot write or delete %s: %s; assigning the queues of %s to the others",
            op.path,
            reason,
            worker,
        )


def present_shares(
    assigned: Mapping[str, frozenset[str]], workers: Mapping[str, WorkerNode]
) -> dict[str, list[str]]:
    """Return the present queues of each worker; `assigned` contains the known assignments."""
    # A worker without an assignment has the queues in its node, except queues assigned to others.
    known = {name for name in workers if name in assigned}
    current = {name: sorted(assigned[name]) for name in known}
    taken = {queue for name in known for queue in assigned[name]}
    for name in workers.keys() - known:
        current[name] = [queue for queue in workers[name].queues if queue not in taken]
    return current


def _fitting(
    worker: str, share: frozenset[str], had: frozenset[str]
) -> tuple[frozenset[str], bytes]:
    """Return an assignment, cut to the size limit of a node, and its value."""
    data = encode_queues(share)
    # Cut new queues first, so that the worker keeps its present queues.
    names = sorted(share, key=lambda name: (name not in had, name))
    while len(data) > MAX_VALUE_BYTES:
        names = names[: len(names) * MAX_VALUE_BYTES // len(data) * 9 // 10]
        data = encode_queues(names)
    if len(names) < len(share):
        log.error(
            "rebalancer: %s for %s do not fit into one node; %d of them have no owner; "
            "start more workers",
            pluralize(len(share), "queue"),
            worker,
            len(share) - len(names),
        )
    return frozenset(names), data


class AssignmentReader:
    """Reads and watches the assignment of one worker.

    If the worker cannot read the assignment, it keeps its queues. The rebalancer notices an
    unreadable node and writes the node again.
    """

    def __init__(
        self,
        path: str,
        machine: m.Machine,
        *,
        clock: Callable[[], float],
        on_read: Callable[[frozenset[str]], None],
    ) -> None:
        self.path = path
        # Whether the worker has an assignment, according to the last read on this connection.
        self.known = False
        self._machine = machine
        self._clock = clock
        self._on_read = on_read
        self._retry_at = float("inf")

    def connected(self) -> None:
        """Read the assignment again, which is unknown until the answer arrives."""
        self.known = False
        self.read()

    def read(self) -> None:
        self._retry_at = float("inf")
        self._machine.ask(m.Get(self.path, watch=True), self._answered)

    def due(self) -> float:
        """Return the time at which `flush` must read the assignment again; `inf` during a read."""
        return self._retry_at

    def flush(self) -> None:
        if self._clock() >= self._retry_at:
            self.read()

    def _answered(self, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse):
            return
        self.known = not isinstance(answer, m.NodeMissing)
        self._retry_at = self._clock() + REREAD_SECONDS
        if isinstance(answer, m.Refused):
            self._retry_at = self._clock() + RETRY_SECONDS
            self._keep(answer.reason)
        elif not isinstance(answer, m.NodeRead):
            self._on_read(frozenset())
        elif (assigned := parse_assignment(answer.data)) is not None:
            self._on_read(assigned)
        else:
            self._keep("it has no list of queues")

    def _keep(self, reason: str) -> None:
        log.warning(
            "cannot read %s: %s; keeping the present queues until the rebalancer writes it again",
            self.path,
            reason,
        )
