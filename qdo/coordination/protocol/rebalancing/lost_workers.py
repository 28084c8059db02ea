"""The workers that went without releasing their queues, as the leader sees them.

Nodes of workers and processes end with their session, so afterwards only the leader can name a
worker that was killed, frozen or cut off. What it remembers ends with its leadership.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from qdo.coordination.protocol.machine import Get, NodeRead, Response
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.text import pluralize

log = logging.getLogger(__name__)

REMEMBERED = 20
"""The last of them: their names are in a node that many clients read."""

Observe: TypeAlias = Callable[[Get, Callable[[Response], None]], None]


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that went without releasing its queues.

    :ivar process: its host and parent process, "" if the leader does not know them.
    :ivar queues: how many queues were assigned to it.
    :ivar at: when the leader noticed: a time of its clock, and for all others Unix time.
    """

    name: str
    process: str
    queues: int
    at: float


class LostWorkers:
    """Finds out which of the workers that are gone had released their queues.

    :ivar found: the last of those that had not, oldest first.
    """

    def __init__(self, layout: Layout, clock: Callable[[], float], observe: Observe) -> None:
        self.found: deque[LostWorker] = deque(maxlen=REMEMBERED)
        self._layout = layout
        self._clock = clock
        self._observe = observe
        self._left: dict[str, WorkerNode] = {}

    def end_term(self) -> None:
        """Forget everything."""
        self.found.clear()
        self._left.clear()

    def record(self, left: Mapping[str, WorkerNode]) -> None:
        """Remember the last nodes of workers that are gone, until `examine`."""
        self._left.update(left)

    def examine(self, shares: Mapping[str, Collection[str]]) -> None:
        """Find out about workers that are gone, before others get their queues.

        A queue that was assigned to nobody else and still has such a worker as owner was not
        released. One of them is read: all others need no request.

        :param shares: the queues that are still assigned to each worker that is gone.
        """
        for name, share in shares.items():
            node = self._left.get(name, WorkerNode())
            owned = set(node.queues).intersection(share) or share
            if owned:
                self._ask(name, node.process, len(share), min(owned))
        self._left.clear()

    def _ask(self, name: str, process: str, queues: int, queue: str) -> None:
        def answered(answer: Response) -> None:
            if not isinstance(answer, NodeRead) or QueueNode.parse(answer.data).owner != name:
                return
            if any(each.name == name for each in self.found):
                return
            self.found.append(LostWorker(name, process, queues, self._clock()))
            log.warning(
                "rebalancer: %s (%s) is gone without releasing its %s; other workers take them;"
                " look for the process: it was killed or frozen, or its host is down",
                name,
                process or "host unknown",
                pluralize(queues, "queue"),
            )

        self._observe(Get(self._layout.queue(queue)), answered)
