"""Checks of the workers, the jobs and the queues of an app."""

from __future__ import annotations

import time
from collections import Counter
from fnmatch import fnmatchcase

from qdo.ops.doctor.case import Case, Diagnosis, failed, ok, unknown, warning
from qdo.ops.items import SILENT_SECONDS, silent
from qdo.ops.worker_status import lost_workers
from qdo.queues import QueueFilter, why_untaken
from qdo.text import join_some, pluralize, short_duration

LOST_SECONDS = 3600.0


def workers(case: Case) -> Diagnosis:
    """Look for workers that do not report, or get no queues."""
    found = case.workers()
    if not found:
        return failed("no worker is registered", "start one with `qdo-worker`")
    faulty = [f"{each.worker} ({each.fault})" for each in found if each.fault is not None]
    if faulty:
        return warning(f"workers get no queues: {join_some(faulty)}", "see `qdo workers`")
    quiet = silent(found)
    if quiet:
        return warning(
            f"{join_some(quiet)} of {pluralize(len(found), 'worker')} did not report for"
            f" {SILENT_SECONDS:g} s",
            "see `qdo worker show`; a job may block the process, or the process is frozen",
        )
    return ok(f"{pluralize(len(found), 'worker')} reported within {SILENT_SECONDS:g} s")


def lost(case: Case) -> Diagnosis:
    """Look for workers that went without releasing their queues, and did not come back."""
    now = time.time()
    found = lost_workers(case.workers(), now - LOST_SECONDS)
    if not found:
        return ok(f"no worker was lost in the last {short_duration(LOST_SECONDS)}")
    names = [
        f"{each.name} ({each.process or 'host unknown'}, {short_duration(now - each.at)} ago)"
        for each in reversed(found)
    ]
    return warning(
        f"{join_some(names)} went without releasing queues; other workers have taken them",
        "look for that process with `ps`: STAT T is stopped; without it, see the end of its log,"
        " and whether its host is up",
    )


def queues(case: Case) -> Diagnosis:
    """Count the queues whose state needs somebody."""
    judged = case.judged()
    critical = Counter(each.state.value for _, each in judged if each.state.is_critical)
    late = Counter(each.state.value for _, each in judged if each.state.is_warning)
    remedy = "see `qdo status` for the worst of them and the next step"
    if critical:
        return failed(f"of {pluralize(len(judged), 'queue')}: {_counts(critical + late)}", remedy)
    if late:
        return warning(f"of {pluralize(len(judged), 'queue')}: {_counts(late)}", remedy)
    return ok(f"{pluralize(len(judged), 'queue')} need nobody")


def jobs_without_queues(case: Case) -> Diagnosis:
    """Look for jobs whose globs match no queue."""
    if case.jobs is None:
        return unknown("the jobs are not known", "name the app as MODULE:APP")
    names = case.names()
    idle = [
        f"{each.name} ({each.queues})"
        for each in case.jobs
        if not any(fnmatchcase(name, each.queues) for name in names)
    ]
    if idle:
        return warning(
            f"no queue matches the glob of {join_some(idle)}",
            "correct the glob, unless its first message is still to come",
        )
    return ok(f"each of {pluralize(len(case.jobs), 'job')} has a queue")


def queues_without_jobs(case: Case) -> Diagnosis:
    """Look for queues that no job of the app, or no worker, takes."""
    names = case.names()
    if case.jobs is not None:
        has_job = QueueFilter(jobs=tuple(each.queues for each in case.jobs)).matcher()
        bare = [name for name in names if not has_job(name)]
        if bare:
            return failed(
                f"no job takes {join_some(bare)}",
                "register a job whose glob matches, or delete the queue with `qdo delete`",
            )
    filters = {each.takes for each in case.workers() if each.fault is None}
    untaken = [f"{name} ({why})" for name in names if (why := why_untaken(name, filters))]
    if untaken:
        return failed(
            f"no worker takes {join_some(untaken)}",
            "start a worker that has a job for it, with other --queues or --exclude",
        )
    if case.jobs is None and not filters:
        return unknown("the jobs are not known", "name the app as MODULE:APP, or start a worker")
    return ok(f"each of {pluralize(len(names), 'queue')} has a job")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items())
