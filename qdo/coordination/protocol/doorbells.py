"""Watch the doorbells of idle queues, which senders notify. A machine without I/O.

A queue's doorbell is ``doorbells/<queue>``, a node without a value. The first notification creates
it, and its version counts the notifications. It is not the queue node: the version of that node
fences the owner's progress, and every notification would cause a checkpoint to be rejected.

There is one watch for each idle queue. It costs the coordinator some hundred bytes, and nothing
else while no sender notifies: one request when the queue becomes idle, and one event for each
notification, which only the owner gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qdo.coordination.protocol.machine import Machine, NodeRead, NoResponse, Response, Stat
from qdo.coordination.znodes.layout import Layout

# Stands for the version of a missing node: its creation gives it version 0.
_NO_NODE = -1


class DoorbellWatches(Machine):
    """The doorbells of the queues of one registration."""

    # Doorbells that several queues share would need fewer watches. But with one for each worker,
    # senders would first have to read the queue's owner, and merge their write with the names that
    # other senders left there. With one for each part of all names, each notification would wake
    # every worker.

    def __init__(self, layout: Layout, on_notified: Callable[[str], None]) -> None:
        super().__init__()
        self._layout = layout
        # Called on the loop with a queue that is no longer watched; it must return at once.
        self._on_notified = on_notified
        self._seen: dict[str, int] = {}
        self._watched: set[str] = set()
        self._up = False

    def watch(self, queues: Iterable[str]) -> None:
        """Report the next notification of each of these queues, or one since the last report."""
        for queue in queues:
            if queue not in self._watched:
                self._watched.add(queue)
                self._read(queue)

    def unwatch(self, queues: Iterable[str]) -> None:
        for queue in queues:
            self._watched.discard(queue)
            self._seen.pop(queue, None)

    def connected(self) -> None:
        self._up = True
        for queue in self._watched:
            self._read(queue)

    def suspended(self) -> None:
        self._up = False

    def changed(self, path: str) -> None:
        queue = path.rpartition("/")[2]
        if queue in self._watched:
            self._seen[queue] = self._seen.get(queue, _NO_NODE) + 1
            self._notified(queue)

    def _read(self, queue: str) -> None:
        if self._up:
            request = Stat(self._layout.doorbell(queue), watch=True)
            self.ask(request, lambda answer: self._read_answered(queue, answer))

    def _read_answered(self, queue: str, answer: Response) -> None:
        if isinstance(answer, NoResponse) or queue not in self._watched:
            return
        version = answer.version if isinstance(answer, NodeRead) else _NO_NODE
        # For a queue that was not watched before, any earlier notification counts: its owner may
        # not have polled since.
        before = self._seen.get(queue, _NO_NODE)
        self._seen[queue] = version
        if version not in (before, _NO_NODE):
            self._notified(queue)

    def _notified(self, queue: str) -> None:
        self._watched.discard(queue)
        self._on_notified(queue)
