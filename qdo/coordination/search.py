"""Finding out which granted queues can be claimed, and waiting for those that cannot yet.

The queue node is read first, data and version in one read, and then, later in the same
session, the owner's worker node: in that order even a lagging follower's answer is safe. If it
shows the owner gone, the owner is gone (numbers are never reused), and the compare-and-swap of
the claim refuses everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from qdo.coordination.layout import Layout, QueueNode, WorkerNode
from qdo.coordination.machine import Answer, Get, Machine, Node, NoNode, Unanswered
from qdo.coordination.slots import Slot, State
from qdo.positions import Positions

log = logging.getLogger(__name__)


class Search:
    """The slots of one worker that are reading, waiting, unusable or free.

    :ivar free: slots that nobody has, at the version read.
    """

    def __init__(
        self,
        layout: Layout,
        name: str,
        machine: Machine,
        slots: Mapping[str, Slot],
        positions: Positions,
    ) -> None:
        self.free: dict[str, Slot] = {}
        self._layout = layout
        self._name = name
        self._machine = machine
        self._slots = slots
        self._positions = positions
        self._reads = 0
        self._to_check: dict[str, list[Slot]] = {}
        self._waiting: dict[str, dict[str, Slot]] = {}
        self._gone: set[str] = set()

    @property
    def reading(self) -> bool:
        """Whether answers are still to come, so that a claim is better sent later."""
        return self._reads > 0

    def connected(self) -> None:
        """Start afresh: no read is under way, no watch is armed."""
        self._reads = 0
        self._to_check.clear()
        self._waiting.clear()
        for slot in self._slots.values():
            if slot.state in (State.READING, State.WAITING, State.UNUSABLE):
                self.read(slot)

    def flush(self) -> None:
        """Look whether the owners found in queue nodes live, after all those reads."""
        if not self._reads:
            checks, self._to_check = self._to_check, {}
            for owner, slots in checks.items():
                self._look(owner, slots)

    def forget(self, slot: Slot) -> None:
        """Take a slot out, whatever its state; late answers for it are passed over."""
        self.free.pop(slot.queue, None)
        waiting = self._waiting.get(slot.owner)
        if waiting is not None:
            waiting.pop(slot.queue, None)

    # --- the queue node ---------------------------------------------------------------

    def read(self, slot: Slot) -> None:
        """Read the node of a queue that is granted and not owned."""
        slot.state = State.READING
        self.free.pop(slot.queue, None)
        self._reads += 1
        self._machine.ask(
            Get(self._layout.queue(slot.queue)), lambda answer: self._read(slot, answer)
        )

    def _read(self, slot: Slot, answer: Answer) -> None:
        if isinstance(answer, Unanswered):
            return  # `connected` starts afresh
        self._reads -= 1
        if self._slots.get(slot.queue) is not slot or slot.state is not State.READING:
            return
        if not isinstance(answer, Node):
            self._leave_alone(slot, "it has no node")
            return
        slot.node = node = QueueNode.parse(answer.data).checked(self._positions)
        slot.version = answer.version
        if node.fault or node.deleted:
            self._leave_alone(slot, node.fault or "it is marked as deleted")
        elif not node.owner or node.owner == self._name or node.owner in self._gone:
            self.offer(slot)
        else:
            self._to_check.setdefault(node.owner, []).append(slot)

    def offer(self, slot: Slot) -> None:
        """Put a slot among those that can be claimed."""
        slot.state = State.FREE
        self.free[slot.queue] = slot

    def _leave_alone(self, slot: Slot, reason: str) -> None:
        """Do nothing with a queue until its node changes; that loses nothing."""
        slot.state = State.UNUSABLE
        log.log(
            logging.INFO if slot.node.deleted else logging.WARNING,
            "%s: queue %s is not processed: %s; its node is watched for a repair",
            self._name,
            slot.queue,
            reason,
        )

        def armed(answer: Answer) -> None:
            changed = isinstance(answer, Node) and answer.version != slot.version
            if changed and slot.state is State.UNUSABLE:
                self.read(slot)

        self._machine.ask(Get(self._layout.queue(slot.queue), watch=True), armed)

    def queue_changed(self, queue: str) -> None:
        """Take note that the watched node of a queue changed."""
        slot = self._slots.get(queue)
        if slot is not None and slot.state is State.UNUSABLE:
            self.read(slot)

    # --- its owner's node -------------------------------------------------------------

    def _look(self, owner: str, slots: list[Slot]) -> None:
        """Read an owner's node; the same read arms the watch, so nothing falls between."""
        self._machine.ask(
            Get(self._layout.worker(owner), watch=True),
            lambda answer: self._looked(owner, slots, answer),
        )

    def _looked(self, owner: str, slots: list[Slot], answer: Answer) -> None:
        current = [
            slot
            for slot in slots
            if self._slots.get(slot.queue) is slot and slot.state in (State.READING, State.WAITING)
        ]
        if isinstance(answer, NoNode):
            self._gone.add(owner)
            for slot in current:
                if slot.state is State.READING:
                    self.offer(slot)
                else:
                    self.read(slot)  # its owner may have written it since we read it
        elif isinstance(answer, Node):
            listed = frozenset(WorkerNode.parse(answer.data).queues)
            for slot in current:
                if slot.queue in listed:
                    slot.state = State.WAITING
                    slot.owner = owner
                    self._waiting.setdefault(owner, {})[slot.queue] = slot
                else:
                    self.read(slot)

    def worker_changed(self, worker: str) -> None:
        """Look again at a worker that has queues granted to this one."""
        waiting = self._waiting.pop(worker, None)
        if waiting:
            self._look(worker, list(waiting.values()))
