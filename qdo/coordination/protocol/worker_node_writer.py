"""Write the worker's own node, and remember the node's queues and version.

Every claim and release rewrites the own node, so claims and releases are serial. The worker has at
most one open write of this node, and writes only when it certainly knows the version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from qdo.coordination.protocol import machine as m
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.queues import EVERYTHING

_LOST = (m.CommitError.NO_NODE, m.CommitError.OTHER)


class WorkerNodeWriter:
    """Writes a worker's own node, and remembers the node's content.

    :ivar listed: the queues in the node, from the last write or the read of a barrier.
    :ivar up: whether the session is connected.
    :ivar draining: whether the worker is draining. Each write contains this value, `filter`,
        `about` and `holds`.
    :ivar filter: the queues that the leader may assign to the worker.
    :ivar holds: the mzxid of the pauses that the worker obeys.
    :ivar about: the process, zone and address of the worker; see `WorkerNode`.
    :ivar rewrite: whether to write the node even without a claim or release.
    """

    def __init__(
        self,
        path: str,
        machine: m.Machine,
        *,
        on_gone: Callable[[], None],
        on_reread: Callable[[Iterable[str]], None],
    ) -> None:
        self.path = path
        self.listed: dict[str, None] = {}
        self.up = False
        self.draining = False
        self.filter = EVERYTHING
        self.holds = 0
        self.about: dict[str, Any] = {}
        self.rewrite = False
        self._machine = machine
        self.gone = on_gone
        self._on_reread = on_reread
        self._version = 0
        self._written_at = 0
        # Whether a write is unanswered, so that the next connection begins with a barrier.
        self.in_doubt = False
        # Whether writes must wait, because a write or a read of the version is in flight.
        self._closed = False
        self._in_flight = False

    @property
    def free(self) -> bool:
        return not self._closed

    @property
    def accepting(self) -> bool:
        """Whether the worker may take queues, because it is connected and not draining."""
        return self.up and not self.draining

    def connected(self) -> None:
        self.up = True
        self._closed = self._in_flight = False

    # --- writing ----------------------------------------------------------------------

    def value(self, plus: Iterable[str], minus: Iterable[str]) -> bytes:
        """Return the value of the node with some queues added and others removed."""
        listed = dict(self.listed)
        listed.update(dict.fromkeys(plus))
        for queue in minus:
            listed.pop(queue, None)
        return self._own(WorkerNode(tuple(listed))).encode()

    def obey(self, zxid: int) -> None:
        self.holds = zxid
        self.rewrite = True

    def _own(self, node: WorkerNode) -> WorkerNode:
        told = replace(node, **self.about)
        return replace(told, draining=self.draining, filter=self.filter, holds=self.holds)

    def commit(
        self, ops: list[m.SetOp], value: bytes, then: m.Callback, checks: tuple[m.CheckOp, ...] = ()
    ) -> None:
        """Write the queue nodes and the own node; `then` must first call `answered`."""
        self._closed = self._in_flight = True
        self._written_at = len(ops)
        own = m.SetOp(self.path, value, self._version)
        self._machine.ask(m.Commit((*ops, own, *checks)), then)

    def answered(self, answer: m.Response) -> bool:
        """Handle the answer to `commit`; return False if the own node is in doubt."""
        if isinstance(answer, m.NoResponse):
            self.in_doubt = True
            return False
        self._closed = self._in_flight = False
        if isinstance(answer, m.Committed):
            self._version = answer.versions[self._written_at]
        return True

    def rejected(self, answer: m.Rejected) -> None:
        """Handle a rejected write, because the own node is gone or an operator wrote it."""
        # Treat an unreadable or unwritable node as gone, because the next registration gets another
        # node.
        if answer.fault in _LOST:
            self.gone()
        else:
            self._closed = True
            self.read()

    # --- reading ----------------------------------------------------------------------

    def read(self) -> None:
        """Read and watch the node, for its version and for operators' requests."""
        self._machine.ask(m.Get(self.path, watch=True), self._read)

    def _read(self, answer: m.Response) -> None:
        if isinstance(answer, (m.NodeMissing, m.Refused)):
            self.gone()
        elif isinstance(answer, m.NodeRead):
            node = WorkerNode.parse(answer.data)
            self._on_reread(node.reread)
            if not self._in_flight:  # if a write is in flight, its answer has the version
                self._closed = False
                self._version = answer.version
                rest = replace(node, queues=(), reread=())
                own = WorkerNode.parse(self._own(rest).encode())
                if set(node.queues) != self.listed.keys() or rest != own:
                    self.rewrite = True  # another program wrote the node

    # --- the barrier ------------------------------------------------------------------

    def barrier(self, then: Callable[[], None]) -> None:
        """Write the node unchanged, so that no earlier request can take effect afterwards."""
        # After the acknowledgment, a late request finds another version and fails. And no lagging
        # server can answer with a state from before the barrier.
        self._closed = self._in_flight = self.in_doubt = True
        self._machine.ask(
            m.Get(self.path, watch=True), lambda answer: self._barrier_read(then, answer)
        )

    def _barrier_read(self, then: Callable[[], None], answer: m.Response) -> None:
        if isinstance(answer, (m.NodeMissing, m.Refused)):
            self.gone()
        elif isinstance(answer, m.NodeRead):
            node = WorkerNode.parse(answer.data)
            # Keep the list of a seek, because the worker reads its queues again after this write.
            value = self._own(node).encode()
            self._machine.ask(
                m.Commit((m.SetOp(self.path, value, answer.version),)),
                lambda written: self._barrier_written(node, then, written),
            )

    def _barrier_written(
        self, node: WorkerNode, then: Callable[[], None], answer: m.Response
    ) -> None:
        if isinstance(answer, m.Rejected) and answer.fault in _LOST:
            self.gone()
        elif isinstance(answer, m.Rejected):
            self.barrier(then)
        elif isinstance(answer, m.Committed):
            self._version = answer.versions[0]
            self.listed = dict.fromkeys(node.queues)
            self._closed = self._in_flight = self.in_doubt = False
            then()
            self._on_reread(node.reread)
