"""Reads the whole app once for all pages and clients, and only when a client requests a page."""

from __future__ import annotations

import logging
import math
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, TimeoutError, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property
from typing import Any, TypeVar

from qdo.connections.opened import Connections, connections_of
from qdo.dashboard.samples import QueueSamples
from qdo.errors import (
    NodeRefusedError,
    QdoError,
    UnreachableError,
    UnreadError,
)
from qdo.fleet.audit import READ_AT_ONCE, entry_names, read_named
from qdo.fleet.audit_entries import AuditEntry
from qdo.fleet.components import ProcessDescription, read_components
from qdo.ops.changes import KINDS, ChangeSum, Difference, Look, changes, ends_of, summed_up
from qdo.ops.doctor import notices
from qdo.ops.doctor_case import Case
from qdo.ops.items import QUEUE_SORTS, WORST, Judged, overview
from qdo.ops.snapshot import REQUESTS
from qdo.ops.status import QueueStatus, Statuses, queue_statuses
from qdo.ops.verdicts import Verdict, VerdictRules, judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.text import describe, shorten

# Maximum number of requests that wait for reads. Each request occupies one of the server's 16
# threads, and questions to workers occupy four threads. The other threads remain for actions.
MOST_WAITING = 8
# Time after which unused connections close. A dashboard without visitors then costs nothing.
IDLE_SECONDS = 60.0

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Task = tuple[Callable[[Connections], Any], "Future[Any]"]

MOST_EVENTS = 1000
COMMAND = "command"
# Kinds of events for filters. All commands of operators are one kind.
EVENT_KINDS = (*KINDS, COMMAND)
_TEXT_CHARACTERS = 300
# The pause after a read, as a multiple of the duration of the read. Therefore reads take at most 5
# % of one processor and of the coordinator's time.
SHARE = 20
LONGEST_PAUSE_SECONDS = 60.0
# Maximum age of a reading that shows whether a queue is catching up now.
JUDGED_SECONDS = 300.0
# Maximum number of kept results of one reading, such as filtered and sorted lists.
MOST_READINGS = 32
KEPT_SECONDS = 5.0
MOST_DIRECT_READS = 64
# Maximum total size of the bodies in kept results of direct reads.
MOST_KEPT_BYTES = 32 << 20
PATIENCE_SECONDS = 10.0
ACTION_SECONDS = 100.0


class ConnectedThread:
    """A thread that runs functions with connections.

    It opens them on demand and closes them after errors.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[[Connections], _Result]) -> Future[_Result]:
        """Run a function after the waiting functions. The future may contain an error."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(RuntimeError("the dashboard is closed"))
                return future
            self._tasks.put((function, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the current function."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._tasks.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Run functions with the same connections. Return whether the thread must continue."""
        with ExitStack() as stack:
            opened: Connections | None = None
            while True:
                try:
                    task = self._tasks.get(timeout=IDLE_SECONDS if opened else None)
                except queue.Empty:
                    return True
                if task is None:
                    return False
                function, future = task
                if not future.set_running_or_notify_cancel():
                    continue  # no request waits for the result anymore
                try:
                    if opened is None or None in (opened.client, opened.broker):
                        # The missing file may exist now.
                        stack.close()
                        opened = stack.enter_context(connections_of(self._settings))
                    future.set_result(function(opened))
                except Exception as error:  # noqa: BLE001 - the waiting caller raises it
                    if not isinstance(error, QdoError):
                        _log.exception("dashboard: cannot read")
                    future.set_exception(error)
                    return True


@dataclass(frozen=True, slots=True)
class SeenChange:
    """A change, and the Unix time of the reading that found it."""

    at: float
    change: Difference

    @property
    def kind(self) -> str:
        return self.change.kind if self.change.kind in KINDS else COMMAND

    @property
    def is_sum(self) -> bool:
        return isinstance(self.change, ChangeSum)


class EventLog:
    """The newest changes, and the last reading, for comparison with the next reading."""

    def __init__(self) -> None:
        # Unix time of the first reading; 0.0 before the first reading.
        self.begin = 0.0
        # The reason why commands of operators are missing, or None.
        self.fault: str | None = None
        self._events: deque[SeenChange] = deque(maxlen=MOST_EVENTS)
        self._before: Look | None = None
        self._unread: Collection[str] = ()
        self._known: set[str] | None = None

    def compare(
        self,
        at: float,
        judged: Judged,
        workers: list[str],
        unread: Collection[str],
        entries: list[AuditEntry],
        ends: Sequence[tuple[float, Difference]] = (),
    ) -> None:
        """Store the changes since the last reading."""
        before = self._before
        after = Look(judged, workers, entries, ends)
        if before is None:
            self.begin = at
        else:
            if set(unread) != set(self._unread):
                # Unreadable parts must not appear as changes, so compare only commands.
                before = Look(judged, workers, (), ends)
            self._events.extend(
                SeenChange(at, _bounded(each)) for each in summed_up(changes(before, after))
            )
        self._before = replace(after, entries=())
        self._unread = unread

    def new_entries(self, connections: Connections) -> list[AuditEntry]:
        """Return the entries of the action log since the last call, newest first."""
        client = connections.client
        layout = connections.layout
        if client is None:
            return []
        try:
            names = entry_names(client, layout)
        except NodeRefusedError as error:
            self.fault = str(error)
            return []
        self.fault = None
        found = set(names)
        new = [] if self._known is None else sorted(found - self._known, reverse=True)
        entries = read_named(client, layout, new[:READ_AT_ONCE])
        self._known = found
        return entries

    def newest(self, glob: str = "*", kinds: Collection[str] = ()) -> list[SeenChange]:
        """Return events, newest first.

        :param glob: selects changes by their subjects. Groups match every glob, because they may
            contain a match.
        :param kinds: kinds from `EVENT_KINDS`; empty for all kinds.
        """
        matches = re.compile(translate(glob)).match
        return [
            each
            for each in reversed(tuple(self._events))
            if (not kinds or each.kind in kinds)
            and (glob == "*" or each.is_sum or matches(each.change.subject))
        ]


def _bounded(change: Difference) -> Difference:
    """Return a change with texts of limited length. Names of queues are short enough."""
    texts = {
        name: shorten(getattr(change, name), _TEXT_CHARACTERS)
        for name in ("kind", "subject", "before", "after", "reason", "by")
    }
    return replace(change, **texts)


@dataclass(frozen=True)
class Reading:
    """The app at one time."""

    statuses: Statuses
    judged: Judged
    workers: Sequence[WorkerStatus]
    processes: Sequence[ProcessDescription]
    notices: Sequence[Mapping[str, str | None]]
    seconds: float
    pause_seconds: float
    _kept: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def at(self) -> float:
        return self.statuses.at

    @cached_property
    def by_name(self) -> Mapping[str, tuple[QueueStatus, Verdict]]:
        return {each[0].queue: each for each in self.judged}

    def overview(self, app: str, worst: int = WORST) -> dict[str, Any]:
        statuses = self.statuses
        return overview(
            app, self.workers, self.judged, self.notices, worst, statuses.unread, statuses.pools
        )

    def in_order(self, sort: str) -> Judged:
        return self.once(("sorted", sort), lambda: sorted(self.judged, key=QUEUE_SORTS[sort]))

    def once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Return the result of a function. Compute the result once for all clients."""
        if key not in self._kept:
            if len(self._kept) >= MOST_READINGS:
                self._kept.clear()
            self._kept[key] = compute()
        kept: _Result = self._kept[key]
        return kept


def describe_fault(error: BaseException) -> str:
    return str(error) if isinstance(error, QdoError) else describe(error)


class FleetReader:
    """The last reading, and a thread that makes the next reading when a client requests it.

    :param pause_seconds: the shortest pause between two readings.
    :param room: maximum number of waiting requests of this dashboard.
    """

    def __init__(
        self,
        settings: Settings,
        rules: VerdictRules,
        pause_seconds: float,
        room: threading.Semaphore,
    ) -> None:
        self._thread = ConnectedThread(settings, "qdo-dashboard-reader")
        self._room = room
        self._settings = settings
        self._rules = rules
        self._shortest = pause_seconds
        self._lock = threading.Lock()
        self._pending: Future[None] | None = None
        self._due = 0.0
        self._reading: Reading | None = None
        self.samples = QueueSamples()
        self.events = EventLog()
        # The reason why the last attempt to read failed, or None.
        self.fault: str | None = None

    def look(self, wait_seconds: float = 0.0) -> Reading | None:
        """Return the last reading, or None. After the pause, start the next reading.

        :param wait_seconds: maximum time to wait for an unfinished reading if the last reading is
            too old.
        """
        with self._lock:
            due = clock() >= self._due
            if due and (self._pending is None or self._pending.done()):
                self._pending = self._thread.submit(self._read)
                self._pending.add_done_callback(self._ended)
            pending = self._pending
        if due and wait_seconds and pending is not None and self._room.acquire(blocking=False):
            try:
                wait([pending], wait_seconds)
            finally:
                self._room.release()
        return self._reading

    def look_again(self) -> None:
        """Make a new reading at the next request, because an action has changed the app."""
        with self._lock:
            self._due = 0.0

    def close(self) -> None:
        self._thread.close()

    def _read(self, connections: Connections) -> None:
        began = clock()
        client = connections.client
        layout = connections.layout
        broker = connections.broker
        statuses = queue_statuses(client, layout, broker, fault=connections.broker_fault)
        workers = worker_statuses(client, layout) if client else []
        processes = read_components(client, layout) if client else []
        judged = judge_all([*self._earlier(statuses), statuses], self._rules)
        self.samples.add(statuses, _waiting_requests(statuses))
        entries = self.events.new_entries(connections)
        names = [each.worker for each in workers]
        ends = list(ends_of(workers))
        self.events.compare(statuses.at, judged, names, statuses.unread, entries, ends)
        seconds = clock() - began
        pause = max(self._shortest, min(SHARE * seconds, LONGEST_PAUSE_SECONDS))
        urls = self._settings
        case = Case(client, broker, layout, {}, urls.coordinator, urls.broker)
        case.once("workers", lambda: workers)  # do not read the workers again
        faults = notices(case)
        self._reading = Reading(statuses, judged, workers, processes, faults, seconds, pause)

    def _ended(self, reading: Future[None]) -> None:
        """Store the result of a reading, or the error, such as refused connections."""
        error = reading.exception()
        last = self._reading
        pause = self._shortest if error is not None or last is None else last.pause_seconds
        self._due = clock() + pause
        self.fault = None if error is None else describe_fault(error)

    def _earlier(self, statuses: Statuses) -> list[Statuses]:
        before = self._reading
        if before is None or statuses.at - before.at >= JUDGED_SECONDS:
            return []
        return [before.statuses]


def _waiting_requests(statuses: Statuses) -> int | None:
    if REQUESTS in statuses.unread:
        return None
    return sum(each.waiting for each in statuses.pools.values())


@dataclass(slots=True)
class _DirectRead:
    """A read, its result, and the number of requests that wait for it."""

    future: Future[Any] = field(default_factory=Future)
    # Time at which the result becomes too old.
    until: float = math.inf
    waiting: int = 0
    # Size of the bodies in the result.
    bytes: int = 0

    @property
    def is_over(self) -> bool:
        return clock() > self.until or self.future.cancelled() or _has_failed(self.future)


class DirectReads:
    """A thread for reads that are not part of the readings of the whole app.

    Equal requests of any number of clients cause one read within `KEPT_SECONDS`, or within `SHARE`
    times the duration of the read. The thread keeps results with large bodies for a shorter time.

    :param room: maximum number of waiting requests of this dashboard; None for any number.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        patience_seconds: float = PATIENCE_SECONDS,
        room: threading.Semaphore | None = None,
    ) -> None:
        self._thread = ConnectedThread(settings, name)
        self._patience_seconds = patience_seconds
        self._room = room
        self._lock = threading.Lock()
        self._kept: dict[Hashable, _DirectRead] = {}

    def get(
        self,
        key: Hashable,
        read: Callable[[Connections], _Result],
        body_bytes: Callable[[_Result], int] = lambda result: 0,
    ) -> _Result:
        """Return the result of `read`, or a recent result of the same key.

        :param body_bytes: a function that returns the size of the bodies in a result.
        :raises UnreadError: the read takes too long, or too many requests wait. A read that no
            request waits for is cancelled.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept.is_over:
                self._forget_old()
                kept = self._kept[key] = self._begun(read, body_bytes)
            kept.waiting += 1
        try:
            with _place(self._room, kept.future):
                result: _Result = kept.future.result(self._patience_seconds)
                return result
        except (TimeoutError, CancelledError) as error:
            seconds = self._patience_seconds
            reason = f"coordinator or broker did not answer within {seconds:g} s"
            raise UnreadError(reason=reason) from error
        finally:
            with self._lock:
                kept.waiting -= 1
                if not kept.waiting:
                    kept.future.cancel()  # has no effect on a read that has begun

    def forget(self) -> None:
        """Forget all results, because an action has changed the app."""
        with self._lock:
            self._kept.clear()

    def close(self) -> None:
        self._thread.close()

    def _begun(
        self, read: Callable[[Connections], Any], body_bytes: Callable[[Any], int]
    ) -> _DirectRead:
        kept = _DirectRead()

        def timed(connections: Connections) -> Any:
            began = clock()
            result = read(connections)
            now = clock()
            kept.until = now + max(KEPT_SECONDS, min(SHARE * (now - began), LONGEST_PAUSE_SECONDS))
            kept.bytes = body_bytes(result)
            self._forget_large()
            return result

        kept.future = self._thread.submit(timed)
        return kept

    def _forget_large(self) -> None:
        """Forget the oldest results with bodies until the rest is small enough."""
        with self._lock:
            size = sum(each.bytes for each in self._kept.values())
            for key, each in list(self._kept.items()):
                if size > MOST_KEPT_BYTES and each.bytes:
                    size -= each.bytes
                    del self._kept[key]

    def _forget_old(self) -> None:
        for key, kept in list(self._kept.items()):
            if kept.is_over or len(self._kept) >= MOST_DIRECT_READS:
                del self._kept[key]


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and isinstance(future.exception(), QdoError | OSError | RuntimeError)


@contextmanager
def _place(room: threading.Semaphore | None, future: Future[Any]) -> Iterator[None]:
    """Take a place among the waiting requests. A request for an available result needs no place."""
    if room is None or future.done():
        yield
    elif not room.acquire(blocking=False):
        reason = f"{MOST_WAITING} requests wait for coordinator or broker already"
        raise UnreadError(reason=reason)
    else:
        try:
            yield
        finally:
            room.release()


class Actions:
    """A thread for the actions of operators. Reads of visitors do not delay these actions."""

    def __init__(self, settings: Settings) -> None:
        self._thread = ConnectedThread(settings, "qdo-dashboard-actions")

    def run(self, change: Callable[[Connections], _Result]) -> _Result:
        """Return the result of an action.

        :raises UnreachableError: the action takes too long. An action that has not begun is
            cancelled.
        """
        future = self._thread.submit(change)
        try:
            return future.result(ACTION_SECONDS)
        except TimeoutError as error:
            reason = "the action did not begin, and nothing was changed; repeat it"
            if not future.cancel():
                reason = (
                    "the action has begun and may still take effect; look at the action log before"
                    " you repeat it"
                )
            reason = f"no answer within {ACTION_SECONDS:g} s: {reason}"
            raise UnreachableError(what="coordinator or broker", reason=reason) from error

    def close(self) -> None:
        self._thread.close()
