"""Why a healthy owner runs none of a queue's messages now, from the report of the worker.

Workers report jobs and counts instead of names of queues: thousands may wait. So each queue of a
job that waits has the reason.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from qdo.coordination.znodes.worker_report import MOST_RUNS, WorkerReport
from qdo.jobs.policy_tables import literal_characters
from qdo.queues import MAX_GLOBS_CHARACTERS, QueueFilter
from qdo.text import pluralize


@dataclass(frozen=True, slots=True)
class QueueWait:
    """The reasons why a queue waits; `QueueStatus` explains them.

    :ivar fault: why none of its messages can run before an operator acts.
    """

    limits: tuple[str, ...] = ()
    fault: str | None = None
    in_line: str | None = None
    rest_seconds: float = 0.0


NO_WAIT = QueueWait()


def wait_of(queue: str, report: WorkerReport | None) -> QueueWait:
    """Return the reasons why a queue with messages may wait at its owner."""
    if report is None:
        return NO_WAIT
    glob = _job_of(queue, report.jobs) if report.waits or report.rests else ""
    limits = report.waits.get(glob, ())
    fault = next((report.unusable[name] for name in limits if name in report.unusable), None)
    return QueueWait(limits, fault, _in_line(report), report.rests.get(glob, 0.0))


MOST_PACE = 1e12
"""A larger number was written by another program."""


def pace_of(queue: str, report: WorkerReport | None) -> dict[str, float]:
    """Return the facts `per_second` and `message_seconds` of `QueueStatus`, {} if unknown."""
    pace = None if report is None else report.paces.get(queue)
    if pace is None or not all(0.0 < each < MOST_PACE for each in pace):
        return {}
    return {"per_second": pace[0], "message_seconds": pace[1]}


def _job_of(queue: str, globs: tuple[str, ...]) -> str:
    """Return the glob of the job that takes a queue, "" without one."""
    return next((each.jobs[0] for each in _most_specific_first(globs) if each.takes(queue)), "")


@functools.lru_cache(maxsize=64)
def _most_specific_first(globs: tuple[str, ...]) -> tuple[QueueFilter, ...]:
    if sum(map(len, globs)) > MAX_GLOBS_CHARACTERS:
        return ()
    ordered = sorted(globs, key=literal_characters, reverse=True)
    return tuple(QueueFilter(jobs=(each,)) for each in ordered)


def _in_line(report: WorkerReport) -> str | None:
    busy, places, ready = report.busy or 0, report.concurrency or 0, report.ready or 0
    if ready > 0:
        count = f"{pluralize(ready, 'queue')} {'waits' if ready == 1 else 'wait'}"
        return f"waits for a free place: {min(busy, places)} of {places} jobs run, and {count}"
    if busy > len(report.long_runs) >= MOST_RUNS:
        return f"may run now, as one of {busy} queues"
    return None
