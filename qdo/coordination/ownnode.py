"""The worker's own node: which queues it lists, at which version, and who may write it now.

Every claim and release rewrites it, so those are serial: one such write is outstanding at a
time, and none is sent before the version is known for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from qdo.coordination.layout import WorkerNode
from qdo.coordination.machine import (
    Answer,
    Commit,
    Committed,
    Fault,
    Get,
    Machine,
    Node,
    NoNode,
    Refused,
    SetOp,
    Then,
    Unanswered,
)
from qdo.filters import EVERYTHING


class OwnNode:
    """What a worker knows of its own node.

    :ivar listed: the queues in it, as last written or read back behind a barrier.
    :ivar draining: to be said in it from the next write on.
    :ivar takes: which queues the worker may be granted; said in every write.
    :ivar rewrite: it should be written even if nothing is claimed or released.
    """

    def __init__(
        self,
        path: str,
        machine: Machine,
        *,
        on_gone: Callable[[], None],
        on_reread: Callable[[Iterable[str]], None],
    ) -> None:
        self.path = path
        self.listed: dict[str, None] = {}
        self.draining = False
        self.takes = EVERYTHING
        self.rewrite = False
        self._machine = machine
        self._on_gone = on_gone
        self._on_reread = on_reread
        self._version = 0
        # No write may start: one is under way, or the version is being read.
        self._closed = False
        self._in_flight = False
        self._in_doubt = False

    @property
    def free(self) -> bool:
        """Whether a write may be started."""
        return not self._closed

    @property
    def in_doubt(self) -> bool:
        """Whether a write was not answered, so that a barrier is due."""
        return self._in_doubt

    def connected(self) -> None:
        """Forget what was under way: after a reconnection nothing is."""
        self._closed = self._in_flight = False

    # --- writing ----------------------------------------------------------------------

    def value(self, plus: Iterable[str], minus: Iterable[str]) -> bytes:
        """Return the value with some queues more and some less."""
        listed = dict(self.listed)
        listed.update(dict.fromkeys(plus))
        for queue in minus:
            listed.pop(queue, None)
        return WorkerNode(tuple(listed), draining=self.draining, takes=self.takes).encode()

    def commit(self, ops: list[SetOp], value: bytes, then: Then) -> None:
        """Write the own node together with queue nodes; `then` first asks `answered`."""
        self._closed = self._in_flight = True
        self._machine.ask(Commit((*ops, SetOp(self.path, value, self._version))), then)

    def answered(self, answer: Answer) -> bool:
        """Take in what an answer to `commit` says of the own node; False if it is in doubt."""
        if isinstance(answer, Unanswered):
            self._in_doubt = True
            return False
        self._closed = self._in_flight = False
        if isinstance(answer, Committed):
            self._version = answer.versions[-1]
        return True

    def refused(self, answer: Refused) -> None:
        """The own node itself was not as remembered: it is gone, or an operator wrote it."""
        if answer.fault is Fault.NO_NODE:
            self._on_gone()
        else:
            self._closed = True
            self.read()

    # --- reading ----------------------------------------------------------------------

    def read(self) -> None:
        """Read it and watch it, for the version and for what an operator asks in it."""
        self._machine.ask(Get(self.path, watch=True), self._read)

    def _read(self, answer: Answer) -> None:
        if isinstance(answer, NoNode):
            self._on_gone()
        elif isinstance(answer, Node):
            self._on_reread(WorkerNode.parse(answer.data).reread)
            if not self._in_flight:  # else its answer says the version
                self._closed = False
                self._version = answer.version

    # --- the barrier ------------------------------------------------------------------

    def barrier(self, then: Callable[[], None]) -> None:
        """Write the node as it is: what was sent before can take effect no more.

        Once that is acknowledged no late request can follow, for it would find another
        version, and no lagging server can answer from before it.
        """
        self._closed = self._in_flight = self._in_doubt = True
        self._machine.ask(
            Get(self.path, watch=True), lambda answer: self._barrier_read(then, answer)
        )

    def _barrier_read(self, then: Callable[[], None], answer: Answer) -> None:
        if isinstance(answer, NoNode):
            self._on_gone()
        elif isinstance(answer, Node):
            node = WorkerNode.parse(answer.data)
            # A seek's list is kept: its queues are read again when this write is seen.
            value = replace(node, draining=self.draining, takes=self.takes).encode()
            self._machine.ask(
                Commit((SetOp(self.path, value, answer.version),)),
                lambda written: self._barrier_written(node, then, written),
            )

    def _barrier_written(
        self, node: WorkerNode, then: Callable[[], None], answer: Answer
    ) -> None:
        if isinstance(answer, Refused) and answer.fault is Fault.NO_NODE:
            self._on_gone()
        elif isinstance(answer, Refused):
            self.barrier(then)
        elif isinstance(answer, Committed):
            self._version = answer.versions[0]
            self.listed = dict.fromkeys(node.queues)
            self._closed = self._in_flight = self._in_doubt = False
            then()
            self._on_reread(node.reread)
