"""Creating queue nodes for queues that the broker has and the coordinator lacks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from qdo.coordination.protocol.assignments import FencedCommit
from qdo.coordination.protocol.machine import CommitError, CreateOp, Rejected, Response
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode

log = logging.getLogger(__name__)

CREATE_BATCH = 250


class QueueNodes:
    """The queue nodes as last listed, and those that are being created.

    :ivar listed: the names of all queue nodes, None while they are unknown.
    """

    def __init__(self, layout: Layout, commit: FencedCommit) -> None:
        self.listed: tuple[str, ...] | None = None
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
            log.error("rebalancer: cannot create a node for queue %r", names[answer.index - 1])
        rest = {name: lasts[name] for at, name in enumerate(names, start=1) if at != answer.index}
        if rest:
            self._create(rest)

    def _created(self, names: Iterable[str]) -> None:
        for name in names:
            self._creating.pop(name, None)
        if not self._creating:
            self._creating = {}  # releases memory: a dict never shrinks by itself
