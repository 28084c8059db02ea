"""Hearing the doorbells of queues that rest: who has sent touched a znode. A machine without I/O.

A queue's bell is ``bells/<queue>``, a node without a value that the first ring makes; its version
counts the rings. Not the queue node: the version of that fences the owner's progress, and every
ring would have a checkpoint refused.

One watch for each resting queue. It costs the coordinator some hundred bytes and nothing while
nobody rings, a request when the queue comes to rest and one event for a ring, which goes to the
owner and to nobody else. Bells that several queues share would need fewer watches: one for each
worker, but then senders must first read who has the queue, and merge what they write with the
names that others left there; one for each part of all names, but then each ring wakes every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qdo.coordination.layout import Layout
from qdo.coordination.machine import Answer, Machine, Node, Stat, Unanswered

_NONE = -1
"""Stands for the version of a node that does not exist: creating it gives it version 0."""


class Bells(Machine):
    """The bells of the queues of one registration.

    :param on_ring: called with a queue that was rung for, which is not listened to any more then;
        on the loop of the coordination: it must return at once.
    """

    def __init__(self, layout: Layout, on_ring: Callable[[str], None]) -> None:
        super().__init__()
        self._layout = layout
        self._on_ring = on_ring
        self._seen: dict[str, int] = {}
        self._attended: set[str] = set()
        self._up = False

    def attend(self, queues: Iterable[str]) -> None:
        """Listen for the next ring of each of these queues.

        One that came since the last one was heard counts. Of a queue that was not listened to
        before nobody knows whether its owner has asked since: a bell that was ever rung counts.
        """
        for queue in queues:
            if queue not in self._attended:
                self._attended.add(queue)
                self._look(queue)

    def leave(self, queues: Iterable[str]) -> None:
        """Forget these queues."""
        for queue in queues:
            self._attended.discard(queue)
            self._seen.pop(queue, None)

    def connected(self) -> None:
        self._up = True
        for queue in self._attended:
            self._look(queue)

    def suspended(self) -> None:
        self._up = False

    def changed(self, path: str) -> None:
        queue = path.rpartition("/")[2]
        if queue in self._attended:
            self._seen[queue] = self._seen.get(queue, _NONE) + 1
            self._heard(queue)

    def _look(self, queue: str) -> None:
        if self._up:
            request = Stat(self._layout.bell(queue), watch=True)
            self.ask(request, lambda answer: self._looked(queue, answer))

    def _looked(self, queue: str, answer: Answer) -> None:
        if isinstance(answer, Unanswered) or queue not in self._attended:
            return
        version = answer.version if isinstance(answer, Node) else _NONE
        before = self._seen.get(queue, _NONE)
        self._seen[queue] = version
        if version not in (before, _NONE):
            self._heard(queue)

    def _heard(self, queue: str) -> None:
        self._attended.discard(queue)
        self._on_ring(queue)
