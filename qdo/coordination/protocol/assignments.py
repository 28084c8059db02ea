"""Writing the assignments of a plan, and knowing which ones are written.

The leader watches each assignment. If another program changes one, its worker would release queues
that no other worker takes, until the leader reads everything again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

from qdo.coordination.protocol.machine import (
    Callback,
    CommitError,
    Committed,
    CreateOp,
    DeleteOp,
    Get,
    NodeRead,
    Op,
    Rejected,
    Response,
    SetOp,
    Stat,
)
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import MAX_TRANSACTION_BYTES, MAX_VALUE_BYTES
from qdo.coordination.znodes.worker_node import WorkerNode, encode_queues, parse_assignment
from qdo.text import pluralize

log = logging.getLogger(__name__)

Change: TypeAlias = tuple[str, frozenset[str], Op]
"""A worker, the queues assigned to it, and the operation that writes them."""
FencedCommit: TypeAlias = Callable[[tuple[Op, ...], Callback], None]
"""Commits operations under the leader's fence; the callback gets the answer."""
Observe: TypeAlias = Callable[[Get | Stat, Callback], None]
"""Sends a read whose answer counts only in the present term."""


class Assignments:
    """The assignment nodes, as read or written in this term.

    :ivar publishing: whether a transaction is in flight.
    :param on_conflict: called when the nodes are not as remembered.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        commit: FencedCommit,
        observe: Observe,
        on_conflict: Callable[[], None],
    ) -> None:
        self.publishing = False
        self._layout = layout
        self._commit = commit
        self._observe = observe
        self._on_conflict = on_conflict
        self._assigned: dict[str, tuple[frozenset[str], int]] = {}
        self._unwritable: set[str] = set()

    def forget(self) -> None:
        """Drop all cached data before everything is read again."""
        self._assigned = {}
        self.publishing = False

    def end_term(self) -> None:
        """Forget also which nodes could not be written."""
        self._unwritable.clear()
        self.forget()

    def read(self, worker: str, then: Callable[[], None]) -> None:
        """Read an assignment node and watch it; call `then` afterwards."""

        def answered(answer: Response) -> None:
            if isinstance(answer, NodeRead):
                self._assigned[worker] = (parse_assignment(answer.data), answer.version)
            then()

        self._observe(Get(self._layout.assignment(worker), watch=True), answered)

    def check(self, worker: str) -> None:
        """Watch an assignment node again; report a conflict if it is not as this term wrote it."""

        def answered(answer: Response) -> None:
            if self.publishing or worker not in self._assigned:
                return  # the outcome of the transaction decides
            version = answer.version if isinstance(answer, NodeRead) else None
            if version != self._assigned[worker][1]:
                log.warning(
                    "rebalancer: another program changed %s; writing the assignment again",
                    self._layout.assignment(worker),
                )
                self._on_conflict()

        self._observe(Stat(self._layout.assignment(worker), watch=True), answered)

    def queues(self) -> set[str]:
        """Return the names of all assigned queues."""
        return {queue for share, _ in self._assigned.values() for queue in share}

    def current(self, workers: Mapping[str, WorkerNode]) -> dict[str, list[str]]:
        """Return the assignment of each worker; without one, the queues in its node."""
        assigned = {name for name in workers if name in self._assigned}
        current = {name: sorted(self._assigned[name][0]) for name in assigned}
        taken = {queue for name in assigned for queue in self._assigned[name][0]}
        for name in workers.keys() - assigned:
            current[name] = [queue for queue in workers[name].queues if queue not in taken]
        return current

    # --- writing ----------------------------------------------------------------------

    def changes(
        self, workers: Mapping[str, WorkerNode], wanted: Mapping[str, list[str]]
    ) -> list[Change]:
        """Return the changes that lead to a plan.

        Workers that gain queues come first: they then watch before the others release.
        """
        changes: list[tuple[int, str, frozenset[str], Op]] = []
        for worker in workers.keys() | self._assigned.keys():
            path = self._layout.assignment(worker)
            had, version = self._assigned.get(worker, (frozenset(), -1))
            if worker in self._unwritable:
                continue
            if worker not in workers:
                changes.append((2, worker, had, DeleteOp(path, version)))
                continue
            share = frozenset(wanted.get(worker, ()))
            if share == had and version >= 0:
                continue
            data = _fitting(worker, share)
            op: Op = SetOp(path, data, version) if version >= 0 else CreateOp(path, data)
            changes.append((int(not share - had), worker, share, op))
        changes.sort(key=lambda change: change[:2])
        return [(worker, share, op) for _, worker, share, op in changes]

    def write(self, changes: list[Change]) -> None:
        """Send the first transaction of the changes; the rest follows its answer."""
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

    def _written(self, batch: list[Change], rest: list[Change], answer: Response) -> None:
        self.publishing = False
        if not isinstance(answer, Committed):
            if isinstance(answer, Rejected) and answer.fault is CommitError.OTHER:
                self._give_up(batch[answer.index - 1][0])
            self._on_conflict()
            return
        for (worker, share, op), version in zip(batch, answer.versions[1:], strict=True):
            if isinstance(op, DeleteOp):
                self._assigned.pop(worker, None)
            else:
                self._assigned[worker] = (share, version)
                if isinstance(op, CreateOp):
                    self.check(worker)
        if rest:
            self.write(rest)

    def _give_up(self, worker: str) -> None:
        """Do not write this assignment again: one that is rejected would block all others."""
        self._unwritable.add(worker)
        log.error(
            "rebalancer: cannot write or delete %s; leaving it as it is",
            self._layout.assignment(worker),
        )


def _fitting(worker: str, share: frozenset[str]) -> bytes:
    """Return the value of an assignment, cut to the size limit of a node."""
    data = encode_queues(share)
    if len(data) <= MAX_VALUE_BYTES:
        return data
    names = sorted(share)
    fits = len(names) * MAX_VALUE_BYTES // len(data) * 9 // 10
    log.error(
        "rebalancer: %s for %s do not fit into one node; %d of them have no owner; "
        "start more workers",
        pluralize(len(names), "queue"),
        worker,
        len(names) - fits,
    )
    return encode_queues(names[:fits])
