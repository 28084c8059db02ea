"""Limits, locks, pauses, streams, documents, outboxes and timers of a testing kit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.brokers.catalog import Backlog
from qdo.brokers.streams import StreamShard, StreamStore, merge, split
from qdo.coordination.protocol.machine import CheckOp, DeleteOp, NodeMissing, NodeRead, SetOp
from qdo.errors import LockTimeoutError, UsageError
from qdo.fleet.documents import Decide, OnChange, Parse
from qdo.fleet.folder_view import FolderView
from qdo.fleet.limit_node import checked_terms
from qdo.fleet.locks import HeldLock, Section
from qdo.fleet.names import checked_name
from qdo.fleet.pause_machine import Pause
from qdo.fleet.pauses import new_pause
from qdo.fleet.permit_counts import PermitCount, StartCount
from qdo.fleet.permits import PermitService
from qdo.jobs.job import Job
from qdo.sending.timers import send_occurrences
from qdo.testing.clock import TOLERANCE_SECONDS, Clock
from qdo.text import describe

_log = logging.getLogger(__name__)


class KitLimit:
    """A limit of the kit. It has no effect until a test sets it."""

    def __init__(self) -> None:
        self.max: int | None = None
        self.borrowed = 0
        self.starts = StartCount()
        self.starts.unlimited = True

    def change(self, max: int | None, rate: float | None, burst: int, now: float) -> None:
        self.max = max
        starts = self.starts
        starts.interrupt()
        starts.unlimited = rate is None
        starts.set_rate((rate or 0.0) / burst, now)
        starts.limit(burst, now)

    def has_free(self, in_use: int, now: float) -> bool:
        permitted = self.max is None or in_use + self.borrowed < self.max
        return permitted and self.starts.has_free(now)


class KitShare:
    """The share of one limit for the engine of one process. Replaces the `LimitShare` of a fleet.

    Each process counts its own permits. If a process loses its lease, no other process gets its
    permits.
    """

    fault: str | None = None
    has_share = True

    def __init__(self, limit: KitLimit, clock: Callable[[], float]) -> None:
        self.starts = limit.starts
        self.counts: tuple[PermitCount, ...] = (limit.starts,)
        self._limit = limit
        self._clock = clock
        self._in_use = 0

    @property
    def why(self) -> str | None:
        """The reason why the limit allows no job at all, or None."""
        return "its max is 0" if self._limit.max == 0 else None

    def has_free(self) -> bool:
        return self._limit.has_free(self._in_use, self._clock())

    def take(self) -> None:
        self._in_use += 1
        self.starts.take()

    def give_back(self) -> bool:
        self._in_use -= 1
        return False  # no other process waits for the permit

    def wait(self, count: int) -> bool:
        self.starts.waiting = count
        return False  # no other process returns a permit

    def awaits_token(self) -> bool:
        return False  # the kit reads `due` after each run

    def due(self) -> float:
        """Return the time at which a waiting caller that lacks only a token can start, or `inf`."""
        now = self._clock()
        if not self.starts.waiting or self.starts.has_free(now):
            return float("inf")
        return self.starts.next_at(now)


class KitLimits:
    """The limits of an app under test, like `qdo limits` in a fleet."""

    valid = True

    def __init__(self, app: App, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock
        self._limits: dict[str, KitLimit] = {}

    def set(
        self,
        name: str,
        *,
        max: int | None = None,
        rate: str | None = None,
        burst: int | None = None,
    ) -> None:
        """Set a limit, like `qdo limits set`. Without `max` and `rate`, the limit has no effect.

        :param rate: starts such as "50/s", "5/m" or "100/h", on the clock of the kit.
        :param burst: maximum number of starts in burst / rate seconds. The default is the starts of
            one second.
        :raises UsageError: a value is invalid, or a job that needs the limit may have several
            messages of a queue in flight. The kit cannot let such messages wait.
        """
        node = checked_terms(max, rate, burst)
        for job in self._app.jobs:
            if name in job.limits and job.order != "queue":
                raise UsageError(
                    reason=f"limit {name!r} must be one of jobs with order='queue', got that of "
                    f"the job for {job.queues!r} with order={job.order!r}; test it without a limit"
                )
        limit = self._limit(checked_name("limit", name))
        limit.change(node.max, node.rate, node.burst, self._clock())

    def shares(self, jobs: Iterable[Job]) -> dict[str, KitShare]:
        """Return the limits of jobs for the engine of a new process."""
        names = {name for job in jobs for name in job.limits}
        return {name: KitShare(self._limit(name), self._clock) for name in sorted(names)}

    def take(self, name: str, timeout_seconds: float | None) -> Callable[[], None] | None:
        """Take a permit for `App.limit`; return the function that returns the permit, or None."""
        # No caller waits, because no other process returns a permit.
        limit = self._limit(name)
        if not limit.has_free(0, self._clock()):
            return None
        limit.starts.take()
        limit.borrowed += 1

        def give_back() -> None:
            limit.borrowed -= 1

        return give_back

    def _limit(self, name: str) -> KitLimit:
        return self._limits.setdefault(name, KitLimit())


class MemoryLocks:
    """Locks within one process. No caller waits, because no other process could release a lock.

    Sections pause nothing, because no job runs during a section unless the test itself runs the
    job.
    """

    def __init__(self, permits: PermitService, operators: Any) -> None:
        self.permits = permits
        self.operators = operators
        self._lock = threading.Lock()
        self._holders: dict[str, list[bool]] = {}
        self._fence = 0

    def register(self, over: Any, timeout_seconds: float) -> None:
        """Do nothing: no command lists the processes of a test."""

    def acquire(
        self, name: str, shared: bool, reason: str, timeout_seconds: float | None
    ) -> tuple[HeldLock, Callable[[], None]]:
        with self._lock:
            holders = self._holders.setdefault(name, [])
            if holders and not (shared and all(holders)):
                raise LockTimeoutError(name=name, seconds=timeout_seconds or 0, holder="")
            holders.append(shared)
            self._fence += 1
            held = [True]

        def release() -> None:
            held.clear()
            holders.remove(shared)

        return HeldLock(name, self._fence, lambda: bool(held)), release

    def pause(
        self, globs: tuple[str, ...], reason: str, timeout_seconds: float
    ) -> tuple[Section, Callable[[], None]]:
        queues = new_pause(globs, reason).queues
        held = [True]
        self._fence += 1
        return Section(" ".join(queues), self._fence, lambda: bool(held)), held.clear


class KitPauses:
    """The pauses of queues in a kit, like `qdo pause` in a fleet."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.pauses: list[Pause] = []
        self._on_change = on_change

    def pause(self, *queues: str, reason: str = "") -> None:
        """Pause the queues that match one of these globs until `resume`."""
        self.replace([*self.pauses, new_pause(queues, reason)])

    def resume(self, *queues: str) -> None:
        """End the pause with exactly these globs. Without globs, end all pauses."""
        left = [each for each in self.pauses if queues and set(each.queues) != set(queues)]
        if queues and len(left) == len(self.pauses):
            paused = ", ".join(repr(" ".join(each.queues)) for each in self.pauses) or "none"
            raise UsageError(
                reason="queues must be those of a pause, got "
                f"{' '.join(queues)!r}; paused: {paused}"
            )
        self.replace(left)

    def replace(self, pauses: Iterable[Pause]) -> None:
        self.pauses[:] = pauses
        self._on_change()


class KitStreams:
    """The shards of an app under test, like `qdo streams` in a fleet."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store

    def split(self, shard: str, at: str | None = None) -> list[str]:
        """Split a shard of a stream, like `qdo streams split`; return the names of the new shards.

        >>> kit.streams.split("user.40-80", at="60")
        ['user.40-60', 'user.60-80']

        :raises ShardStateError: the shard is sealed.
        """
        return self._reshard(split(self._store.shards(), shard, at))

    def merge(self, *shards: str) -> str:
        """Merge neighboring shards, like `qdo streams merge`; return the name of the new shard.

        :raises ShardStateError: one of the shards is sealed.
        """
        return self._reshard(merge(self._store.shards(), *shards))[0]

    def _reshard(self, children: list[StreamShard]) -> list[str]:
        self._store.add(children)
        return [each.queue for each in children]


class MemoryDocuments:
    """The store of documents of a TestKit."""

    writer = "TestKit"

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, NodeRead]] = {}
        self._views: dict[str, FolderView] = {}
        self._zxid = 0

    def path(self, name: str, key: str) -> str:
        return f"{name}/{key}"

    def view(self, name: str, parse: Parse, on_change: OnChange) -> FolderView:
        view = self._views.get(name)
        if view is None:
            view = FolderView(name, parse, lambda key: on_change(self._views[name], key))
            self._views[name] = view
            for key, node in self._nodes.get(name, {}).items():
                view.take(key, node)
            view.ltime = self._zxid = self._zxid + 1
        return view

    def fresh(self, view: FolderView, ltime: int | None, timeout_seconds: float) -> bool:
        return True

    def perform(
        self,
        name: str,
        key: str,
        decide: Decide,
        is_mine: Callable[[NodeRead], bool],
        guess: NodeRead | None,
    ) -> int:
        nodes = self._nodes.setdefault(name, {})
        ops = decide(nodes.get(key, NodeMissing()))
        self._zxid += 1
        for op in ops or ():
            if isinstance(op, DeleteOp):
                del nodes[key]
            elif not isinstance(op, CheckOp):
                version = op.version + 1 if isinstance(op, SetOp) else 0
                nodes[key] = NodeRead(op.data, version, self._zxid)
        if (view := self._views.get(name)) is not None:
            view.take(key, nodes.get(key, NodeMissing()))
            view.ltime = self._zxid
        return self._zxid


class KitRelay:
    """Sends the messages of an app's outboxes to the broker of a kit.

    A test may run without the database of the outbox. Like a worker, the kit only logs errors.
    """

    def __init__(self, app: App, broker: Broker) -> None:
        self._app = app
        self._broker = broker
        self._failed: set[str] = set()

    def relay(self) -> bool:
        """Send all due rows; return True if there were due rows."""
        moved = 0
        for outbox in self._app.outboxes:
            table = str(outbox.table.name)
            try:
                while count := outbox.relay(self._broker):
                    moved += count
                self._failed.discard(table)
            except Exception as error:  # noqa: BLE001 - databases raise what their drivers raise
                if table not in self._failed:
                    self._failed.add(table)
                    _log.warning("cannot relay the messages in %s: %s", table, describe(error))
        return moved > 0

    def next_due(self) -> float | None:
        """Return the Unix time at which the next delayed row is due, or None."""
        working = [each for each in self._app.outboxes if str(each.table.name) not in self._failed]
        dues = [each.next_due() for each in working]
        return min((due for due in dues if due is not None), default=None)


class KitTimers:
    """Sends the messages of an app's timers, starting when the kit is opened."""

    def __init__(self, app: App, clock: Clock, backlog: Callable[[str], Backlog]) -> None:
        self._app = app
        self._clock = clock
        self._backlog = backlog
        self._sent_until = clock.now

    def next_due(self) -> float | None:
        """Return the Unix time of the next occurrence, or None without timers."""
        return min((e.after(self._sent_until) for e in self._app.timers.values()), default=None)

    def send(self) -> bool:
        """Send the messages of due timers; return True if there were due timers."""
        begin = self._sent_until
        self._sent_until = self._clock.now + TOLERANCE_SECONDS
        due = []
        for timer in self._app.timers.values():
            occurrence = timer.due(begin, self._sent_until)
            waits = self._backlog(timer.queue)
            must_wait = timer.unless_waiting and (waits.count or waits.delayed)
            if occurrence is not None and occurrence.sends and not must_wait:
                due.append((timer, occurrence))
        send_occurrences(self._app, due)
        return bool(due)
