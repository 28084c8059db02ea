"""Find the assigned queues that the worker can claim, and wait for the others.

The worker first reads the data and version of the queue node in one read. Later in the same
session, it reads the owner's worker node. In this order, even the answer of a lagging server is
safe. If the owner's node is missing, the owner is gone, because the coordinator never reuses
numbers. In all other cases, the version check of the claim rejects an outdated read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from qdo.coordination.protocol import machine as m
from qdo.coordination.protocol.claims import OwnedQueue, QueueState
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.positions import Positions

log = logging.getLogger(__name__)
NO_NODE = "it has no node"
# The pause before the worker retries a refused node. No watch fires when an ACL changes.
RETRY_SECONDS = 15.0


class Deletions:
    """The known version of the folder of queue nodes; each deletion of a node changes it."""

    def __init__(self, folder: str, machine: m.Machine) -> None:
        self.known = False
        self._folder = folder
        self._machine = machine
        self._version = 0
        self.reading = False
        self._unchecked = False

    def read(self) -> None:
        """Read the version, which claims of queue nodes check if the nodes are read later."""
        self.known = False
        self.reading = True
        self._machine.ask(m.Stat(self._folder), self._read)

    def _read(self, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse):
            return  # after reconnecting, the worker reads again
        self.reading = False
        if isinstance(answer, m.Refused):
            self._give_up(answer.reason)
        self.known = self._unchecked or isinstance(answer, m.NodeRead)
        if isinstance(answer, m.NodeRead):
            self._version = answer.version

    def checks(self) -> tuple[m.CheckOp, ...]:
        """Return the operations that each claim must contain."""
        return () if self._unchecked else (m.CheckOp(self._folder, self._version),)

    def rejected(self, answer: m.Rejected) -> None:
        """Handle a claim that failed because of an operation from `checks`."""
        self.known = False
        if answer.fault is m.CommitError.OTHER:
            self._give_up(answer.reason)

    def _give_up(self, reason: str) -> None:
        if not self._unchecked:
            self._unchecked = True
            log.warning(
                "cannot check %s: %s; claiming queues all the same; give qdo all rights on it",
                self._folder,
                reason,
            )


class Acquisition:
    """The slots of one worker in the states reading, waiting, unusable and free."""

    def __init__(
        self,
        layout: Layout,
        name: str,
        machine: m.Machine,
        slots: Mapping[str, OwnedQueue],
        positions: Positions,
        *,
        clock: Callable[[], float],
        lease: Lease,
    ) -> None:
        # The slots of queues that had no owner when this worker read their nodes.
        self.free: dict[str, OwnedQueue] = {}
        self.deletions = Deletions(layout.queues, machine)
        self._layout = layout
        self._name = name
        self._machine = machine
        self._slots = slots
        self._positions = positions
        self._reads = 0
        self._to_check: dict[str, list[OwnedQueue]] = {}
        self._waiting: dict[str, dict[str, OwnedQueue]] = {}
        self._gone: set[str] = set()
        self._clock = clock
        self._lease = lease
        self._read_at: dict[str, float] = {}

    @property
    def reading(self) -> bool:
        """Whether answers to reads are outstanding, for which the claim should wait."""
        return self._reads > 0

    def connected(self) -> None:
        """Start again, because the new connection has no open reads or armed watches."""
        self._reads = 0
        self._to_check.clear()
        self._waiting.clear()
        self._read_at.clear()
        self._read_all(QueueState.READING, QueueState.WAITING, QueueState.UNUSABLE)

    def start_over(self, answer: m.Rejected) -> None:
        """Read the free slots again, because queue nodes have been deleted since the last read."""
        self.deletions.rejected(answer)
        self._read_all(QueueState.FREE)

    def _read_all(self, *states: QueueState) -> None:
        if not self.deletions.known:
            self.deletions.read()
        for slot in list(self._slots.values()):
            if slot.state in states:
                self.read(slot)

    def due(self) -> float:
        """Return the time at which `flush` has to read the next node; `inf` if there is none."""
        return min(self._read_at.values(), default=float("inf"))

    def flush(self) -> None:
        """Read due nodes again; after the last answer, check whether the owners live."""
        if self._read_at and self.due() <= (now := self._clock()):
            for queue in [queue for queue, at in self._read_at.items() if at <= now]:
                del self._read_at[queue]
                slot = self._slots.get(queue)
                if slot is not None and slot.state in (QueueState.UNUSABLE, QueueState.WAITING):
                    self.read(slot)
        if self.free and not (self.deletions.known or self.deletions.reading):
            self._read_all(QueueState.FREE)  # the folder of queues was missing
        if not self._reads:
            checks = self._to_check
            self._to_check = {}
            for owner, slots in checks.items():
                self._look(owner, slots)

    def forget(self, slot: OwnedQueue) -> None:
        """Drop a slot in any state, and ignore late answers for it."""
        self.free.pop(slot.queue, None)
        self._read_at.pop(slot.queue, None)
        waiting = self._waiting.get(slot.owner)
        if waiting is not None:
            waiting.pop(slot.queue, None)

    # --- the queue node ---------------------------------------------------------------

    def read(self, slot: OwnedQueue) -> None:
        slot.state = QueueState.READING
        self.free.pop(slot.queue, None)
        self._read_at.pop(slot.queue, None)
        self._reads += 1
        self._machine.ask(
            m.Get(self._layout.queue(slot.queue)), lambda answer: self._read(slot, answer)
        )

    def _read(self, slot: OwnedQueue, answer: m.Response) -> None:
        if isinstance(answer, m.NoResponse):
            return  # `connected` starts over
        self._reads -= 1
        if self._slots.get(slot.queue) is not slot or slot.state is not QueueState.READING:
            return
        if isinstance(answer, m.Refused):
            self.refuse(slot, answer.reason)
            return
        if not isinstance(answer, m.NodeRead):
            slot.version = -1
            self._watch_unusable(slot, NO_NODE)
            return
        slot.node = node = QueueNode.parse(answer.data).checked(self._positions)
        slot.version = answer.version
        if node.fault or node.deleted:
            slot.take_at = float("inf")
            self._watch_unusable(slot, node.fault or "it is marked as deleted")
        elif not node.owner or node.owner == self._name or node.owner in self._gone:
            self.offer(slot)
        else:
            self._to_check.setdefault(node.owner, []).append(slot)

    def offer(self, slot: OwnedQueue) -> None:
        slot.state = QueueState.FREE
        self.free[slot.queue] = slot

    def refuse(self, slot: OwnedQueue, reason: str) -> None:
        """Ignore a queue if the coordinator refuses to let this worker read or write its node."""
        self._read_at[slot.queue] = self._clock() + RETRY_SECONDS
        slot.version = -1
        self._watch_unusable(slot, reason)

    def _watch_unusable(self, slot: OwnedQueue, reason: str) -> None:
        """Ignore a queue until its node changes. No messages are lost."""
        slot.state = QueueState.UNUSABLE
        if slot.fault != reason:
            slot.fault = reason
            log.log(
                logging.INFO if slot.node.deleted else logging.WARNING,
                "%s: queue %s is not processed: %s; waiting for its node to change",
                self._name,
                slot.queue,
                reason,
            )
        self._watch(slot)

    def _watch(self, slot: OwnedQueue) -> None:
        """Watch a queue node, and read it again after a change; a watch needs no right to read."""

        def armed(answer: m.Response) -> None:
            # The version of a refused node is unknown, but the worker reads the node again later.
            known = slot.version >= 0 or slot.fault == NO_NODE
            if isinstance(answer, m.NodeRead) and known and answer.version != slot.version:
                self.queue_changed(slot.queue)

        self._machine.ask(m.Stat(self._layout.queue(slot.queue), watch=True), armed)

    def queue_changed(self, queue: str) -> None:
        """Handle a change of a queue's watched node."""
        slot = self._slots.get(queue)
        if slot is not None and (
            slot.state is QueueState.UNUSABLE
            or (slot.state is QueueState.WAITING and slot.take_at < float("inf"))
        ):
            self.read(slot)

    # --- its owner's node -------------------------------------------------------------

    def _look(self, owner: str, slots: list[OwnedQueue]) -> None:
        """Read and watch an owner's node in one request, so the worker misses no change."""
        self._machine.ask(
            m.Get(self._layout.worker(owner), watch=True),
            lambda answer: self._looked(owner, slots, answer),
        )

    def _looked(self, owner: str, slots: list[OwnedQueue], answer: m.Response) -> None:
        current = [
            slot
            for slot in slots
            if self._slots.get(slot.queue) is slot
            and slot.state in (QueueState.READING, QueueState.WAITING)
        ]
        ghost = isinstance(answer, m.NodeRead) and not answer.ephemeral_owner  # not a worker
        if isinstance(answer, m.NodeMissing) or ghost:
            self._gone.add(owner)
            for slot in current:
                if slot.state is QueueState.READING:
                    self.offer(slot)
                else:
                    self.read(slot)  # the owner may have written it meanwhile
        elif isinstance(answer, m.NodeRead):
            listed = frozenset(WorkerNode.parse(answer.data).queues)
            for slot in current:
                if slot.queue in listed:
                    slot.take_at = float("inf")
                    slot.fault = ""
                    self._wait(slot, owner)
                else:
                    self._unlisted(slot, owner)
        elif isinstance(answer, m.Refused):
            self._watch_refused(owner, current, answer.reason)

    def _wait(self, slot: OwnedQueue, owner: str) -> None:
        slot.state = QueueState.WAITING
        slot.owner = owner
        self._waiting.setdefault(owner, {})[slot.queue] = slot

    def _unlisted(self, slot: OwnedQueue, owner: str) -> None:
        """Handle a queue node that names a live owner, if the owner does not list the queue."""
        # Usually the owner has released the queue since the read, so read the queue node again.
        if slot.unlisted != slot.version:
            slot.unlisted = slot.version
            slot.take_at = float("inf")
            self.read(slot)
            return
        # A release changes both nodes, so another program must have written one of them. When the
        # owner notices the change, it lists its queues again. If neither node changes for a session
        # timeout, the queue counts as free.
        now = self._clock()
        if slot.take_at == float("inf"):
            slot.take_at = now + self._lease.timeout_seconds
            slot.fault = f"its node names {owner}, which does not list it"
            log.warning(
                "%s: queue %s is not processed: %s; claiming it in %.1f s unless that changes",
                self._name,
                slot.queue,
                slot.fault,
                self._lease.timeout_seconds,
            )
            self._watch(slot)
        if now < slot.take_at:
            self._read_at[slot.queue] = slot.take_at
            self._wait(slot, owner)
        else:
            self.offer(slot)

    def _watch_refused(self, owner: str, slots: list[OwnedQueue], reason: str) -> None:
        """Read queues again when their owner's unreadable node changes."""
        for slot in slots:
            if slot.state is QueueState.WAITING:
                self.read(slot)
                continue
            self._wait(slot, owner)
            self._read_at[slot.queue] = self._clock() + RETRY_SECONDS
            if slot.fault != reason:
                slot.fault = reason
                log.warning("%s: queue %s waits for %s: %s", self._name, slot.queue, owner, reason)

        def armed(answer: m.Response) -> None:
            if isinstance(answer, m.NodeMissing):
                self.worker_changed(owner)

        self._machine.ask(m.Stat(self._layout.worker(owner), watch=True), armed)

    def worker_changed(self, worker: str) -> None:
        """Read a changed worker node again, if its worker owns queues assigned to this worker."""
        waiting = self._waiting.pop(worker, None)
        if waiting:
            self._look(worker, list(waiting.values()))


def faults(slots: Mapping[str, OwnedQueue]) -> dict[str, str]:
    """Return the faults of unprocessed queues by name; omit faults that the queue node shows."""
    return {
        slot.queue: slot.fault
        for slot in slots.values()
        if slot.fault not in ("", NO_NODE, slot.node.fault) and not slot.node.deleted
    }
