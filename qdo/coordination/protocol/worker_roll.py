"""The registered workers, the workers that get queues, and the lost workers.

Every client of the coordinator can create a node below `workers`. Only ephemeral nodes count as
workers, and only workers that claim their assigned queues continue to get queues. If other nodes
counted as workers, no worker would process the queues assigned to them.

Lost workers are workers that are gone without releasing their queues. The nodes of a worker and its
process end with their session. So only the leader can still name a worker that was killed, frozen
or cut off. The leader forgets lost workers at the end of its leadership.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from qdo.coordination.protocol.assignments import Observe
from qdo.coordination.protocol.machine import Get, NodeRead, Refused, Response
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.coordination.znodes.worker_report import LostWorker
from qdo.queues import QueueFilter
from qdo.text import join_some, pluralize

log = logging.getLogger(__name__)
JUDGE_SECONDS = 2.0
# A worker that claims none of its queues for this time gets no queues for `ASIDE_SECONDS`.
IDLE_SECONDS = 10.0
ASIDE_SECONDS = 300.0
NAMES_SHOWN = 20
# The number of lost workers that the leader remembers. Many clients read the node with their names.
REMEMBERED = 20


class WorkerRoll:
    """The registered workers that the leader knows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.listed = False
        self.workers: dict[str, WorkerNode] = {}
        self._clock = clock
        self._names: frozenset[str] = frozenset()
        self._unable: dict[str, str] = {}
        self._idle_since: dict[str, float] = {}
        self._aside_until: dict[str, float] = {}
        self._unmatched: list[str] = []
        # The time at which `judge` next looks for workers that claim no queues.
        self.judge_at = 0.0

    def clear(self) -> None:
        """Forget the nodes, before the leader reads all nodes again."""
        self.listed = False
        self.workers = {}
        self._names = frozenset()

    def end_term(self) -> None:
        self.clear()
        self._unable = {}
        self._idle_since = {}
        self._aside_until = {}
        self._unmatched = []

    def record(self, names: Iterable[str]) -> tuple[list[str], dict[str, WorkerNode]]:
        """Record a listing; return the names of new nodes, and the nodes of gone workers."""
        # Ignore nodes of other tools, which take no queues.
        listed = frozenset(filter(is_worker_name, names))
        new = sorted(listed - self._names)
        gone = self._names - listed
        left = {name: self.workers.pop(name, WorkerNode()) for name in gone}
        for name in gone:
            self._unable.pop(name, None)
        self.workers.update((name, WorkerNode()) for name in new)
        self._names = listed
        self.listed = True
        return new, left

    def read(self, name: str, answer: Response) -> tuple[WorkerNode | None, WorkerNode | None]:
        """Record a worker's node; return the old and the new value, each None if unknown."""
        before = self.workers.get(name)
        if isinstance(answer, NodeRead) and before is not None:
            if not answer.ephemeral_owner:
                del self.workers[name]
                self._exclude(name, "its node has no session; delete the node")
                return before, None
            self._unable.pop(name, None)
            after = self.workers[name] = WorkerNode.parse(answer.data)
            return before, after
        if isinstance(answer, Refused):
            self._exclude(name, answer.reason)
        return before, None

    def report_unlisted(self, path: str, reason: str) -> None:
        """Log once for each reason that the leader cannot list a folder."""
        # Do not resign. Without the list the leader makes no plan, but another leader could not
        # list the folder either.
        if self._unable.get(path) != reason:
            self._unable[path] = reason
            log.error(
                "rebalancer: cannot list %s: %s; workers keep their queues, and none is assigned "
                "until the folder can be listed; correct its ACL",
                path,
                reason,
            )

    def report_unmatched(self, unmatched: list[str]) -> None:
        """Log the queues that no worker takes, if this list has changed."""
        if unmatched == self._unmatched:
            return
        if unmatched:
            log.warning(
                "rebalancer: no worker takes %s (no job, --queues or --exclude), and their messages"
                " wait; start a worker that has a job for them: %s",
                pluralize(len(unmatched), "queue"),
                join_some(unmatched, NAMES_SHOWN),
            )
        else:
            log.info("rebalancer: every queue has a worker that takes it")
        self._unmatched = unmatched

    def _exclude(self, name: str, reason: str) -> None:
        if self._unable.get(name) != reason:
            self._unable[name] = reason
            log.warning("rebalancer: %s gets no queues: %s", name, reason)

    def able(self, writable: Callable[[str], bool]) -> dict[str, QueueFilter]:
        """Return the filters of the workers that may get queues and have `writable` assignments."""
        able = {
            name: node.filter
            for name, node in self.workers.items()
            if not node.draining and name not in self._unable and writable(name)
        }
        now = self._clock()
        claiming = {
            name: each for name, each in able.items() if self._aside_until.get(name, 0.0) <= now
        }
        return claiming or able

    def judge(self, share_of: Callable[[str], Collection[str]]) -> dict[str, str]:
        """Return workers that have not claimed any queue for some time, each with one queue."""
        now = self._clock()
        if now < self.judge_at:
            return {}
        self.judge_at = now + JUDGE_SECONDS
        suspects = [name for name, node in self.workers.items() if not node.queues]
        suspects = [name for name in suspects if share_of(name)]
        free = dict[str, str]()
        if suspects:
            # A worker is not to blame while other workers still own all its queues.
            owned = {queue for node in self.workers.values() for queue in node.queues}
            shares = {name: set(share_of(name)) - owned for name in suspects}
            free = {name: min(share) for name, share in shares.items() if share}
        self._idle_since = {name: self._idle_since.get(name, now) for name in free}
        return {
            name: free[name]
            for name, since in self._idle_since.items()
            if now - since >= IDLE_SECONDS and self._aside_until.get(name, 0.0) <= now
        }

    def set_aside(self, name: str, queues: int) -> None:
        """Assign no queues for some time to a worker that claims no queues."""
        now = self._clock()
        self._aside_until[name] = now + ASIDE_SECONDS
        log.warning(
            "rebalancer: %s has claimed none of its %s for %.0f s; assigning them to other"
            " workers for %.0f s; check that worker",
            name,
            pluralize(queues, "queue"),
            now - self._idle_since.get(name, now),
            ASIDE_SECONDS,
        )


class LostWorkers:
    """Finds workers that are gone without releasing their queues; `found` is in order of time."""

    def __init__(self, layout: Layout, clock: Callable[[], float], observe: Observe) -> None:
        self.found: deque[LostWorker] = deque(maxlen=REMEMBERED)
        self._layout = layout
        self._clock = clock
        self._observe = observe
        self._left: dict[str, WorkerNode] = {}

    def end_term(self) -> None:
        self.found.clear()
        self._left.clear()

    def record(self, left: Mapping[str, WorkerNode]) -> None:
        """Remember the last nodes of workers that are gone, until `examine`."""
        self._left.update(left)

    def examine(self, shares: Mapping[str, Collection[str]]) -> None:
        """Examine gone workers that still have shares, before other workers get the shares."""
        # If a queue names a gone worker as owner, and is assigned to no other worker, the worker
        # did not release the queue. Read only one queue for each worker, to save requests.
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
