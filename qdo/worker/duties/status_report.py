"""The duty "component" keeps the component node of a worker up to date."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from gevent.event import Event

from qdo.coordination.znodes.worker_report import (
    MINUTES,
    MOST_RUNS,
    STARVED_SECONDS,
    LastHour,
    WorkerReport,
)
from qdo.jobs.job import Job
from qdo.settings.hosts import describe_process
from qdo.settings.live import LiveSettings
from qdo.system.clock import clock
from qdo.system.processes import waited_seconds
from qdo.text import shorten
from qdo.worker.duties.duty import CurrentMember, Duty
from qdo.worker.engine.dispatcher import Dispatcher
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.engine.slot import Counters, Slot, SlotState
from qdo.worker.runs import Runs

# Maximum seconds between two updates of the component node.
REFRESH_SECONDS = 10.0
# Minimum number of reports per session timeout. A dead worker stays registered for a session
# timeout. If its last report is too old, `qdo workers` shows the worker as silent.
REPORTS_PER_SESSION = 3
# Maximum number of queues to list. The list is short, because many clients read component nodes.
MOST_QUEUES = 100
# Maximum number of paused jobs to list, and maximum length of each error in characters.
MOST_JOBS = 20
ERROR_CHARACTERS = 200
# Minimum lag, run time and rest, in seconds, of listed queues, messages and jobs.
WORTH_SECONDS = 1.0
# A starved worker exceeds both limits: the share of its time, and the share of its runnable time,
# for which it waits for a processor. Idle workers on a machine with six busy processes per
# processor wait for 0.07 of their time. Busy workers with three busy neighbors wait for 0.75 of
# their runnable time. For a worker with a hundredth of a processor, the shares are 0.4 to 0.9 and
# 0.98.
WAITED_SHARE = 0.33
WANTED_SHARE = 0.8


class ProcessorWaits:
    """Measures the share of the time for which a thread has waited for a processor."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float, float]] = deque()

    def look(self, now: float, waited: float, ran: float) -> float | None:
        """Return the share of the time if the thread is starved, otherwise None.

        `waited` and `ran` are the total seconds of the thread so far.
        """
        self._marks.append((now, waited, ran))
        while len(self._marks) > 1 and self._marks[1][0] <= now - STARVED_SECONDS:
            self._marks.popleft()
        began, waited_before, ran_before = self._marks[0]
        seconds = now - began
        waited_since = waited - waited_before
        wanted = waited_since + ran - ran_before
        if seconds < STARVED_SECONDS or waited_since < max(
            WAITED_SHARE * seconds, WANTED_SHARE * wanted
        ):
            return None
        return round(waited_since / seconds, 2)


class MinuteCounts:
    """The counts of each minute of the last hour, computed from the totals at each look."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._before = [0, 0, 0]
        self._minutes: dict[int, list[int]] = {}

    def look(self, now: float) -> LastHour:
        """Return the counts of the hour that ends at a Unix time."""
        newest = int(now // 60)
        counters = self._counters
        failed = counters.unsuccessful - counters.skipped
        # The counts cost nothing per message, but are late by up to one report.
        row = self._minutes.setdefault(newest, [0, 0, 0])
        for column, total in enumerate((counters.processed, failed, counters.dead_lettered)):
            # A total may shrink for a while, because the engine subtracts attempts that must not
            # count.
            row[column] += max(0, total - self._before[column])
            self._before[column] = max(total, self._before[column])
        shown = range(newest, newest - MINUTES, -1)
        self._minutes = {each: self._minutes[each] for each in shown if each in self._minutes}
        rows = [self._minutes.get(each, (0, 0, 0)) for each in shown]
        return LastHour(newest, *map(_without_last_zeros, zip(*rows, strict=True)))


def _without_last_zeros(counts: Sequence[int]) -> tuple[int, ...]:
    size = len(counts)
    while size and not counts[size - 1]:
        size -= 1
    return tuple(counts[:size])


class StatusReport(Duty):
    """Writes the status of a worker to its component node regularly, and when `due` is set."""

    name = "component"
    ends_at_drain = False

    def __init__(
        self,
        dispatcher: Dispatcher,
        pipeline: Pipeline,
        jobs: Sequence[Job],
        live: LiveSettings,
        current: CurrentMember,
        due: Event,
        deaths: tuple[tuple[int, float, str], ...],
    ) -> None:
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._minutes = MinuteCounts(pipeline.counters)
        self._globs = tuple(each.queues for each in jobs)
        rests = {each.queues: each.rest_seconds for each in jobs}
        self._rests = {glob: each for glob, each in rests.items() if each >= WORTH_SECONDS}
        settings = live.in_force.now
        self._process = describe_process(settings) | {"parent": os.getppid()}
        self._concurrency = settings.concurrency
        self._refresh_seconds = min(
            REFRESH_SECONDS, settings.session_timeout_seconds / REPORTS_PER_SESSION
        )
        self._due = due
        self._deaths = deaths
        self._waits = ProcessorWaits()
        self._loop_thread = threading.get_native_id()
        self._live = live
        self._current = current
        self.runs = Runs(dispatcher.in_flight)

    def run(self) -> None:
        while True:
            if not self._due.wait(self._refresh_seconds):
                self.runs.name_long()
            self._due.clear()
            self.refresh()

    def refresh(self) -> None:
        """Write the component node now, if the worker is registered."""
        member = self._current.member
        if member is not None:
            member.refresh_component(self.component(member.name))

    def component(self, name: str) -> dict[str, Any]:
        """Return the content of the component node of a worker with this name."""
        member = self._current.member
        facts = self._process | self._pipeline.counters.dump()
        if member is not None:
            facts |= member.leader.facts()
        report = WorkerReport(
            state=self._current.state,
            worker=name,
            concurrency=self._concurrency,
            queues=len(self._dispatcher.slots),
            last_hour=self._minutes.look(time.time()),
            busy=sum(1 for _ in self._dispatcher.running()),
            behind=lags(self._dispatcher.slots.values()),
            paces=paces(self._dispatcher.slots.values(), clock()),
            jobs=self._globs,
            ready=self._dispatcher.ready() + self._pipeline.permits.waiting,
            waits=self._pipeline.limits.waits(),
            unusable=self._pipeline.limits.faults(),
            rests=self._rests,
            paused_jobs=self._paused_jobs(),
            long_runs=self._long_runs(),
            live=self._live.dump(),
            starved=self._waits.look(
                clock(), waited_seconds(self._loop_thread), time.thread_time()
            ),
            deaths=self._deaths,
            **facts,
        )
        return report.dump()

    def _paused_jobs(self) -> dict[str, str]:
        paused = self._pipeline.paused_globs()
        return {
            glob: shorten(paused[glob], ERROR_CHARACTERS) for glob in sorted(paused)[:MOST_JOBS]
        }

    def _long_runs(self) -> tuple[tuple[str, str, int, float, float | None], ...]:
        """Return queue, id, attempt, seconds, and for unusually long runs the usual seconds."""
        # List only messages that were already running at an earlier report. The run times are too
        # short by at most the time between two reports.
        runs = [each for each in self.runs.look() if each.seconds >= WORTH_SECONDS]
        longest = heapq.nlargest(MOST_RUNS, runs, key=lambda each: (each.is_unusual, each.seconds))
        items = []
        for each in longest:
            usual = round(each.durations.usual_seconds, 3) if each.is_unusual else None
            items.append((*each.key, round(each.seconds, 1), usual))
        return tuple(items)


def paces(slots: Iterable[Slot], now: float) -> dict[str, tuple[float, float]]:
    """Return the paces of the queues that have messages left, see `Durations.pace`."""
    going = (
        (slot.claim.done, slot.queue, slot.durations)
        for slot in slots
        if slot.state is not SlotState.IDLE and slot.claim is not None and not slot.is_pool
    )
    found = {}
    for _, queue, durations in heapq.nsmallest(MOST_QUEUES, going, key=lambda each: each[:2]):
        pace = durations.pace(now)
        if pace is not None:
            rate, seconds = pace
            found[queue] = float(f"{rate:.3g}"), float(f"{seconds:.3g}")
    return found


def lags(slots: Iterable[Slot]) -> dict[str, float]:
    """Return the age in seconds of the first unprocessed message, by queue."""
    behind = []
    for slot in slots:
        # Only polled brokers have subscriptions. At other brokers, every client can read the lag.
        seconds = None if slot.subscription is None else slot.subscription.behind_seconds()
        if seconds is not None and seconds >= WORTH_SECONDS:
            behind.append((seconds, slot.queue))
    worst = heapq.nlargest(MOST_QUEUES, behind)
    return {queue: round(seconds, 1) for seconds, queue in worst}
