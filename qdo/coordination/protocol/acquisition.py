"""Finding out which assigned queues can be claimed, and waiting for the others.

The queue node is read first, data and version in one read. Then, later in the same session, the
owner's worker node is read. In that order even a lagging follower's answer is safe. If it shows
the owner gone, the owner is gone: numbers are never reused. The compare-and-swap of the claim
rejects all other cases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from qdo.coordination.protocol.claims import OwnedQueue, QueueState
from qdo.coordination.protocol.machine import (
    Get,
    Machine,
    NodeMissing,
    NodeRead,
    NoResponse,
    Response,
)
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.positions import Positions

log = logging.getLogger(__name__)


class Acquisition:
    """The slots of one worker that are reading, waiting, unusable or free.

    :ivar free: slots without an owner, at the version read.
    """

    def __init__(
        self,
        layout: Layout,
        name: str,
        machine: Machine,
        slots: Mapping[str, OwnedQueue],
        positions: Positions,
    ) -> None:
        self.free: dict[str, OwnedQueue] = {}
        self._layout = layout
        self._name = name
        self._machine = machine
        self._slots = slots
        self._positions = positions
        self._reads = 0
        self._to_check: dict[str, list[OwnedQueue]] = {}
        self._waiting: dict[str, dict[str, OwnedQueue]] = {}
        self._gone: set[str] = set()

    @property
    def reading(self) -> bool:
        """Whether answers are outstanding. Then it is better to send the claim later."""
        return self._reads > 0

    def connected(self) -> None:
        """Start again: no read is in flight, no watch is armed."""
        self._reads = 0
        self._to_check.clear()
        self._waiting.clear()
        for slot in self._slots.values():
            if slot.state in (QueueState.READING, QueueState.WAITING, QueueState.UNUSABLE):
                self.read(slot)

    def flush(self) -> None:
        """After all queue nodes were read, check whether their owners live."""
        if not self._reads:
            checks, self._to_check = self._to_check, {}
            for owner, slots in checks.items():
                self._look(owner, slots)

    def forget(self, slot: OwnedQueue) -> None:
        """Drop a slot in any state; late answers for it are ignored."""
        self.free.pop(slot.queue, None)
        waiting = self._waiting.get(slot.owner)
        if waiting is not None:
            waiting.pop(slot.queue, None)

    # --- the queue node ---------------------------------------------------------------

    def read(self, slot: OwnedQueue) -> None:
        """Read the node of a queue that is assigned and not owned."""
        slot.state = QueueState.READING
        self.free.pop(slot.queue, None)
        self._reads += 1
        self._machine.ask(
            Get(self._layout.queue(slot.queue)), lambda answer: self._read(slot, answer)
        )

    def _read(self, slot: OwnedQueue, answer: Response) -> None:
        if isinstance(answer, NoResponse):
            return  # `connected` starts again
        self._reads -= 1
        if self._slots.get(slot.queue) is not slot or slot.state is not QueueState.READING:
            return
        if not isinstance(answer, NodeRead):
            self._watch_unusable(slot, "it has no node")
            return
        slot.node = node = QueueNode.parse(answer.data).checked(self._positions)
        slot.version = answer.version
        if node.fault or node.deleted:
            self._watch_unusable(slot, node.fault or "it is marked as deleted")
        elif not node.owner or node.owner == self._name or node.owner in self._gone:
            self.offer(slot)
        else:
            self._to_check.setdefault(node.owner, []).append(slot)

    def offer(self, slot: OwnedQueue) -> None:
        """Make a slot available to be claimed."""
        slot.state = QueueState.FREE
        self.free[slot.queue] = slot

    def _watch_unusable(self, slot: OwnedQueue, reason: str) -> None:
        """Ignore a queue until its node changes; this loses no messages."""
        slot.state = QueueState.UNUSABLE
        log.log(
            logging.INFO if slot.node.deleted else logging.WARNING,
            "%s: queue %s is not processed: %s; waiting for its node to change",
            self._name,
            slot.queue,
            reason,
        )

        def armed(answer: Response) -> None:
            changed = isinstance(answer, NodeRead) and answer.version != slot.version
            if changed and slot.state is QueueState.UNUSABLE:
                self.read(slot)

        self._machine.ask(Get(self._layout.queue(slot.queue), watch=True), armed)

    def queue_changed(self, queue: str) -> None:
        """Called when the watched node of a queue changed."""
        slot = self._slots.get(queue)
        if slot is not None and slot.state is QueueState.UNUSABLE:
            self.read(slot)

    # --- its owner's node -------------------------------------------------------------

    def _look(self, owner: str, slots: list[OwnedQueue]) -> None:
        """Read an owner's node; the same read arms the watch, so no change is missed."""
        self._machine.ask(
            Get(self._layout.worker(owner), watch=True),
            lambda answer: self._looked(owner, slots, answer),
        )

    def _looked(self, owner: str, slots: list[OwnedQueue], answer: Response) -> None:
        current = [
            slot
            for slot in slots
            if self._slots.get(slot.queue) is slot
            and slot.state in (QueueState.READING, QueueState.WAITING)
        ]
        if isinstance(answer, NodeMissing):
            self._gone.add(owner)
            for slot in current:
                if slot.state is QueueState.READING:
                    self.offer(slot)
                else:
                    self.read(slot)  # its owner may have written it since the read
        elif isinstance(answer, NodeRead):
            listed = frozenset(WorkerNode.parse(answer.data).queues)
            for slot in current:
                if slot.queue in listed:
                    slot.state = QueueState.WAITING
                    slot.owner = owner
                    self._waiting.setdefault(owner, {})[slot.queue] = slot
                else:
                    self.read(slot)

    def worker_changed(self, worker: str) -> None:
        """Read a worker's node again: it has queues that are assigned to this worker."""
        waiting = self._waiting.pop(worker, None)
        if waiting:
            self._look(worker, list(waiting.values()))
