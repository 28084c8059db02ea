"""Watch the doorbells of idle queues, through which senders notify owners. Does no I/O.

A queue's doorbell is ``doorbells/<queue>``, a node without a value. The first notification creates
the doorbell, and the version of the node counts the notifications. The queue node cannot serve as a
doorbell, because its version fences the owner's progress. Every notification would cause a rejected
checkpoint.

Each idle queue has one watch, which takes a few hundred bytes at the coordinator. The worker sends
one request when the queue becomes idle. Each notification causes one event, for the owner only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qdo.coordination.protocol.machine import Machine, NodeRead, NoResponse, Response, Stat
from qdo.coordination.znodes.layout import Layout

# The version of a missing node. A new node has version 0.
_NO_NODE = -1


class DoorbellWatches(Machine):
    """The doorbells of the queues of one registration."""

    # Shared doorbells would need fewer watches. But with one doorbell per worker, senders would
    # have to read the queue's owner first, and merge their write with the names from other senders.
    # If each doorbell served many queues, a notification would wake many workers.

    def __init__(self, layout: Layout, on_notified: Callable[[str], None]) -> None:
        super().__init__()
        self._layout = layout
        # A function that the loop calls with a notified queue after its watch has ended. The
        # function must return at once.
        self._on_notified = on_notified
        self._seen: dict[str, int] = {}
        self._watched: set[str] = set()
        self._up = False

    def watch(self, queues: Iterable[str]) -> None:
        """Report the next notification of each queue, or one missed since the last report."""
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
        # For a newly watched queue, report any earlier notification, because no owner may have
        # polled since.
        before = self._seen.get(queue, _NO_NODE)
        self._seen[queue] = version
        if version not in (before, _NO_NODE):
            self._notified(queue)

    def _notified(self, queue: str) -> None:
        self._watched.discard(queue)
        self._on_notified(queue)
