"""Reads the whole app for all pages and clients together, only while somebody looks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from qdo.dashboard.reading.connected_thread import ConnectedThread
from qdo.dashboard.reading.event_log import EventLog
from qdo.dashboard.reading.samples import QueueSamples
from qdo.errors import QdoError
from qdo.fleet.components import ProcessDescription, read_components
from qdo.ops.doctor.case import Case
from qdo.ops.doctor.checks import notices
from qdo.ops.items import QUEUE_SORTS, Judged
from qdo.ops.status import QueueStatus, Statuses, queue_statuses
from qdo.ops.verdicts import Verdict, VerdictRules, judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.sending.connections import Connections
from qdo.settings.settings import Settings
from qdo.system.clock import clock
from qdo.text import describe

SHARE = 20
"""The pause after a read is this many times as long as the read: reading takes at most 5 % of one
processor, and as small a share of the coordinator's time."""
LONGEST_PAUSE_SECONDS = 60.0
JUDGED_SECONDS = 300.0
"""An older reading tells nothing about whether a queue catches up now."""


MOST_KEPT = 32
"""Results for one reading: lists of queues that different clients filter and sort."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Reading:
    """The app at one time.

    :ivar notices: faults around the queues, as items.
    :ivar number: counts the readings of this process.
    :ivar seconds: how long it took.
    :ivar pause_seconds: how long the next one is waited for.
    """

    number: int
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
        """Unix time of this machine's clock."""
        return self.statuses.at

    @cached_property
    def by_name(self) -> Mapping[str, tuple[QueueStatus, Verdict]]:
        """The queues by name."""
        return {each[0].queue: each for each in self.judged}

    def in_order(self, sort: str) -> Judged:
        """Return the queues in an order of `QUEUE_SORTS`."""
        return self.once(("sorted", sort), lambda: sorted(self.judged, key=QUEUE_SORTS[sort]))

    def once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Return what a function returns, computed once for all clients that ask for the same."""
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = compute()
        kept: _Result = self._kept[key]
        return kept


def describe_fault(error: BaseException) -> str:
    """Return why a reading failed."""
    return str(error) if isinstance(error, QdoError) else describe(error)


class FleetReader:
    """The last reading, and a thread that makes the next one when somebody looks.

    :param pause_seconds: the shortest pause between two readings.
    :ivar samples: of each queue, over time.
    :ivar events: what has changed between the readings.
    :ivar fault: why the last attempt to read failed, None if it did not.
    """

    def __init__(self, settings: Settings, rules: VerdictRules, pause_seconds: float) -> None:
        self._thread = ConnectedThread(settings, "qdo-dashboard-reader")
        self._settings = settings
        self._rules = rules
        self._shortest = pause_seconds
        self._lock = threading.Lock()
        self._pending: Future[None] | None = None
        self._due = 0.0
        self._reading: Reading | None = None
        self.samples = QueueSamples()
        self.events = EventLog()
        self.fault: str | None = None

    def look(self, wait_seconds: float = 0.0) -> Reading | None:
        """Return the last reading, None before the first; begin the next one if it is due.

        :param wait_seconds: how long to wait for a reading that is being made, if the last one is
            older than the pause after it.
        """
        with self._lock:
            due = clock() >= self._due
            if due and (self._pending is None or self._pending.done()):
                self._pending = self._thread.submit(self._read)
                self._pending.add_done_callback(self._ended)
            pending = self._pending
        if due and wait_seconds and pending is not None:
            wait([pending], wait_seconds)
        return self._reading

    @property
    def number(self) -> int:
        """The number of the last reading; it changes with each."""
        reading = self._reading
        return 0 if reading is None else reading.number

    def look_again(self) -> None:
        """Make the next reading as soon as somebody looks: something was changed."""
        with self._lock:
            self._due = 0.0

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _read(self, connections: Connections) -> None:
        began = clock()
        client, layout = connections.client, connections.layout
        fault = connections.broker_fault
        statuses = queue_statuses(client, layout, connections.broker, fault=fault)
        workers = worker_statuses(client, layout) if client else []
        processes = read_components(client, layout) if client else []
        judged = judge_all([*self._earlier(statuses), statuses], self._rules)
        self.samples.add(statuses)
        entries = self.events.new_entries(connections)
        names = [each.worker for each in workers]
        self.events.compare(statuses.at, judged, names, statuses.unread, entries)
        seconds = clock() - began
        pause = max(self._shortest, min(SHARE * seconds, LONGEST_PAUSE_SECONDS))
        number = self.number + 1
        places = self._settings.coordinator, self._settings.broker
        case = Case(client, connections.broker, layout, {}, *places)
        case.once("workers", lambda: workers)  # they are not read again
        found = notices(case)
        self._reading = Reading(number, statuses, judged, workers, processes, found, seconds, pause)

    def _ended(self, reading: Future[None]) -> None:
        """Note the result of a reading, or why there is none: the connections may be refused."""
        error = reading.exception()
        failed = error is not None or self._reading is None
        pause = self._shortest if failed else cast(Reading, self._reading).pause_seconds
        self._due = clock() + pause
        self.fault = None if error is None else describe_fault(error)

    def _earlier(self, statuses: Statuses) -> list[Statuses]:
        before = self._reading
        recent = before is not None and statuses.at - before.at < JUDGED_SECONDS
        return [before.statuses] if before is not None and recent else []
