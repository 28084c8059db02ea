"""The checks of `qdo doctor` that look at workers."""

from __future__ import annotations

import time

from qdo.coordination.znodes.worker_report import STARVED_SECONDS
from qdo.ops.doctor_case import Case, Diagnosis, failed, ok, warning
from qdo.ops.items import SILENT_SECONDS, silent
from qdo.ops.worker_status import deaths, lost_workers
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
            "see `qdo workers NAME`; a job may block the process, or the process is frozen",
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


def dead_processes(case: Case) -> Diagnosis:
    """Look for worker processes that died and were replaced."""
    now = time.time()
    found = deaths(case.workers(), now - LOST_SECONDS)
    if not found:
        return ok(f"no worker process died in the last {short_duration(LOST_SECONDS)}")
    worker, last = found[-1]
    count = f"{pluralize(len(found), 'worker')} died and {'was' if len(found) == 1 else 'were'}"
    count += f" replaced in the last {short_duration(LOST_SECONDS)}"
    return warning(
        f"{count}; {last.text(worker.report.host)}, {short_duration(now - last.at)} ago",
        "see the log of qdo-worker there; without an operator, SIGKILL comes from the kernel when"
        " memory is short (dmesg): limit jobs with memory_mib, or run fewer at once",
    )


def starved(case: Case) -> Diagnosis:
    """Look for workers whose machine or quota hardly lets them run."""
    found = [
        f"{each.worker} ({each.report.host}, process {each.report.pid}: {each.report.starved:.0%})"
        for each in case.workers()
        if each.report.starved is not None
    ]
    if not found:
        return ok("each worker gets the processor that it needs")
    return warning(
        f"{join_some(found)} waited for a processor for that share of {STARVED_SECONDS:g} s",
        "see `top` on that host: raise the CPU quota of the worker, or run fewer processes there",
    )
