"""Checks the invariants that hold at every zxid, by replaying a coordinator's own history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from tests.support.zookeeper_txn_log import Txn


@dataclass
class Oracle:
    """Replays transactions and notes every violation.

    :ivar violations: one sentence each, with the zxid at which it came true.
    :ivar claims: how many claims were seen; a test that saw none proves nothing.
    :ivar claim_zxids: for each queue the zxids of its claims, in order.
    """

    layout: Layout
    violations: list[str] = field(default_factory=list)
    claims: int = 0
    claim_zxids: dict[str, list[int]] = field(default_factory=dict)
    releases: int = 0
    checkpoints: int = 0
    seeks: int = 0
    departures: int = 0
    _workers: dict[str, frozenset[str]] = field(default_factory=dict)
    _queues: dict[str, QueueNode] = field(default_factory=dict)
    _listed_by: dict[str, set[str]] = field(default_factory=dict)
    _ever: set[str] = field(default_factory=set)

    def replay(self, txns: Iterable[Txn]) -> None:
        """Apply transactions, and check the changed nodes after each."""
        for txn in txns:
            touched: set[str] = set()
            for change in txn.changes:
                folder, _, name = change.path.rpartition("/")
                if folder == self.layout.workers:
                    touched |= self._worker(name, change.data, txn.zxid)
                elif folder == self.layout.queues:
                    touched.add(name)
                    self._queue(name, change.data, txn.zxid)
            for queue in touched:
                self._check(queue, txn.zxid)

    def _worker(self, name: str, data: bytes | None, zxid: int) -> set[str]:
        before = self._workers.pop(name, None)
        after: frozenset[str] = frozenset()
        if data is not None:
            if before is None and name in self._ever:
                self.violations.append(f"zxid {zxid:#x}: {name} was used before")
            self._ever.add(name)
            after = frozenset(WorkerNode.parse(data).queues)
            self._workers[name] = after
        else:
            self.departures += 1
        for queue in (before or frozenset()) - after:
            self._listed_by.get(queue, set()).discard(name)
        for queue in after:
            self._listed_by.setdefault(queue, set()).add(name)
        return set(before or ()) ^ set(after)

    def _queue(self, name: str, data: bytes | None, zxid: int) -> None:
        before = self._queues.get(name, QueueNode())
        after = QueueNode.parse(data or b"")
        self._queues[name] = after
        if data is None:
            if not before.deleted:
                self.violations.append(f"zxid {zxid:#x}: {name} was deleted without a mark")
            return
        if after.last < before.last and after.seek == before.seek:
            self.violations.append(
                f"zxid {zxid:#x}: last of {name} went back from {before.last} to {after.last}"
            )
        if after.seek != before.seek:
            self.seeks += 1
        elif after.owner and after.owner != before.owner:
            self.claims += 1
            self.claim_zxids.setdefault(name, []).append(zxid)
            if before.owner in self._workers:
                self.violations.append(
                    f"zxid {zxid:#x}: {name} went from {before.owner}, alive, to {after.owner}"
                )
        elif before.owner and not after.owner:
            self.releases += 1
        elif after.last != before.last:
            self.checkpoints += 1

    def _check(self, queue: str, zxid: int) -> None:
        owner = self._queues.get(queue, QueueNode()).owner
        living = {owner} if owner in self._workers else set()
        listing = self._listed_by.get(queue, set())
        if len(listing) > 1:
            self.violations.append(f"zxid {zxid:#x}: {queue} is listed by {sorted(listing)}")
        if listing != living:
            self.violations.append(
                f"zxid {zxid:#x}: {queue} names {sorted(living)} and is listed by {sorted(listing)}"
            )
