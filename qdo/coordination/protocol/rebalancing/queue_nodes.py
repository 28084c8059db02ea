"""Which queue nodes exist: the leader creates missing ones, and workers notice deletions.

The versions of a node that is created again start at 0, so a late claim could find the version that
it read of the former node. Therefore each deletion also writes the folder `queues`, and each claim
checks that the folder still has the version that it had before the queue nodes were read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence

from qdo.coordination.protocol.assignments import FencedCommit
from qdo.coordination.protocol.machine import (
    CheckOp,
    CommitError,
    CreateOp,
    Machine,
    NodeRead,
    NoResponse,
    Refused,
    Rejected,
    Response,
    Stat,
)
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode

log = logging.getLogger(__name__)

CREATE_BATCH = 250


class QueueNodes:
    """The queue nodes as last listed, and those that are being created.

    :ivar listed: the names of all queue nodes, None while they are unknown.
    :ivar deleted: the names of those marked as deleted, None while they are unknown.
    """

    def __init__(self, layout: Layout, commit: FencedCommit) -> None:
        self.listed: tuple[str, ...] | None = None
        self.deleted: frozenset[str] | None = None
        self._layout = layout
        self._commit = commit
        self._missing: dict[str, int] = {}
        self._creating: dict[str, int] = {}

    def relist(self) -> None:
        """Forget the listing; queues that are being created are created again if missing."""
        self._missing |= self._creating
        self._creating = {}
        self.listed = None

    def end_term(self) -> None:
        """Forget everything."""
        self._missing = {}
        self._creating = {}
        self.listed = None

    def record_listing(self, names: tuple[str, ...]) -> None:
        """Record a listing, and create the nodes that wait for it."""
        self.listed = names
        self._created(names)
        self.create_missing()

    def planned(self, assigned: Callable[[], Container[str]]) -> Sequence[str]:
        """Return the queues to distribute: deleted ones bring no work, but would count as load.

        :param assigned: returns the queues that are already assigned: no others are planned while
            it is unknown which are deleted.
        """
        listed, deleted = self.listed or (), self.deleted
        if deleted is None:
            known = assigned()
            return [queue for queue in listed if queue in known]
        return [queue for queue in listed if queue not in deleted] if deleted else listed

    def want(self, names: Iterable[str], last: int) -> None:
        """Record queues that must have nodes."""
        self._missing.update(dict.fromkeys(names, last))

    def create_missing(self) -> None:
        """Create the recorded queues that have no node yet."""
        if self.listed is None:
            return  # the next listing calls this again
        missing, self._missing = self._missing, {}
        new = sorted(set(missing).difference(self.listed, self._creating))
        for start in range(0, len(new), CREATE_BATCH):
            self._create({name: missing[name] for name in new[start : start + CREATE_BATCH]})

    def _create(self, lasts: dict[str, int]) -> None:
        self._creating.update(lasts)
        ops = tuple(
            CreateOp(self._layout.queue(name), QueueNode(last=last).encode())
            for name, last in lasts.items()
        )
        self._commit(ops, lambda answer: self._create_answered(lasts, answer))

    def _create_answered(self, lasts: dict[str, int], answer: Response) -> None:
        self._created(lasts)
        names = list(lasts)
        if not isinstance(answer, Rejected) or answer.fault is CommitError.NO_NODE:
            return  # created; or discovery asks again once the folder `queues` is recreated
        if answer.fault is not CommitError.NODE_EXISTS:
            log.error(
                "rebalancer: queue %r gets no node, and its messages wait: %s; correct the rights"
                " with `qdo acl apply`",
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
            self._creating = {}  # releases memory: a dict never shrinks by itself


class Deletions:
    """The version of the folder of queue nodes, as known to one worker.

    :ivar known: whether claims can be checked.
    :ivar reading: whether the version is being read.
    """

    def __init__(self, folder: str, machine: Machine) -> None:
        self.known = False
        self._folder = folder
        self._machine = machine
        self._version = 0
        self.reading = False
        self._unchecked = False

    def read(self) -> None:
        """Read the version. Queue nodes read after this call may be claimed under it."""
        self.known = False
        self.reading = True
        self._machine.ask(Stat(self._folder), self._read)

    def _read(self, answer: Response) -> None:
        if isinstance(answer, NoResponse):
            return  # read again after the reconnection
        self.reading = False
        if isinstance(answer, Refused):
            self._give_up(answer.reason)
        self.known = self._unchecked or isinstance(answer, NodeRead)
        if isinstance(answer, NodeRead):
            self._version = answer.version

    def checks(self) -> tuple[CheckOp, ...]:
        """Return the operations that a claim must contain."""
        return () if self._unchecked else (CheckOp(self._folder, self._version),)

    def rejected(self, answer: Rejected) -> None:
        """Handle a claim that failed for such an operation."""
        self.known = False
        if answer.fault is CommitError.OTHER:
            self._give_up(answer.reason)

    def _give_up(self, reason: str) -> None:
        if not self._unchecked:
            self._unchecked = True
            log.warning(
                "cannot check %s: %s; claiming queues all the same; give qdo all rights on it",
                self._folder,
                reason,
            )
