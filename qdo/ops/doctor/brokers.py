"""Checks of the broker, and of the files and limits of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import time

from qdo.ops.doctor.case import Case, Diagnosis, failed, ok, unknown, warning
from qdo.ops.verdicts import QueueHealth
from qdo.system.processes import RESERVE
from qdo.text import join_some, pluralize, short_duration

SLOW_SECONDS = 2.0
MOST_QUEUES = 50
"""Queues whose attributes are read where that is a request for each."""
LITTLE_BYTES, TOO_LITTLE_BYTES = 1 << 30, 100 << 20
USUAL_FILES = 1024


def listing(case: Case) -> Diagnosis:
    """Time the list of queues."""
    began = time.monotonic()
    names = case.names()
    seconds = time.monotonic() - began
    text = f"the broker listed {pluralize(len(names), 'queue')} in {seconds * 1000:.0f} ms"
    if seconds > SLOW_SECONDS:
        return warning(text, "look at the load of the broker, and at the network to it")
    return ok(text)


def configuration(case: Case) -> Diagnosis:
    """Ask the broker what a starting worker would warn of."""
    broker = case.opened()
    if not broker.capabilities.checks_config:
        return ok("this broker has no settings for its queues")
    names = broker.catalog.names()[:MOST_QUEUES]
    found = broker.catalog.config_warnings({name: case.policy_of(name) for name in names})
    if found:
        return warning(found[0], f"see the sentence; and {len(found) - 1} more in workers' logs")
    return ok(f"the settings of {pluralize(len(names), 'queue')} fit the failure policies")


def deadlines(case: Case) -> Diagnosis:
    """Compare the time limits of jobs with the time for which the broker hides a message."""
    hold = case.opened().capabilities.hold_seconds
    if hold is None:
        return ok("this broker can hold a message for any time")
    if case.jobs is None:
        return unknown("the jobs are not known", "name the app as MODULE:APP")
    long = [each.name for each in case.jobs if each.timeout_seconds and each.timeout_seconds > hold]
    if long:
        return failed(
            f"timeout_seconds of {join_some(long)} is longer than the {hold:g} s for which the"
            " broker can hide a message",
            f"set it to {hold:g} or less; workers do not start with such a job",
        )
    without = [each.name for each in case.jobs if each.timeout_seconds is None]
    if without:
        return ok(
            f"{join_some(without)} may take {short_duration(hold)}, without a limit of theirs"
        )
    return ok(f"every job ends within the {short_duration(hold)} that a message can be hidden")


def retention(case: Case) -> Diagnosis:
    """Compare the age of waiting messages with the time after which the broker deletes them."""
    judged = case.judged()
    for state, answer in ((QueueHealth.LOST, failed), (QueueHealth.EXPIRING, warning)):
        found = [(queue.queue, why) for queue, why in judged if why.state is state]
        if found:
            queue, verdict = found[0]
            remedy = "raise the retention of the broker, or add workers; see `qdo status`"
            text = f"{pluralize(len(found), 'queue')} {state.value}, first {queue}"
            return answer(f"{text}: {verdict.reason}", remedy)
    unasked = case.statuses().unasked
    more = f"; {unasked} queues were not asked" if unasked else ""
    return ok(f"the broker is not about to delete a message{more}")


def dead_letters(case: Case) -> Diagnosis:
    """Count dead letters."""
    counts = case.opened().dead_letters.counts()
    total = sum(counts.values())
    if total:
        worst = max(counts, key=lambda name: counts[name])
        text = f"{pluralize(total, 'dead letter')} in {pluralize(len(counts), 'queue')}"
        return warning(f"{text}, most of them in {worst}", "see `qdo dead-letters`")
    return ok("no message is a dead letter")


def open_files(case: Case) -> Diagnosis:
    """Compare the limit of open files with what the owner of all queues would need."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return ok("this user may open any number of files")
    needed = USUAL_FILES
    if case.broker is not None and case.broker.capabilities.subscriptions:
        workers = max(1, len(case.workers()) if case.client is not None else 1)
        needed = max(needed, RESERVE + -(-len(case.names()) // workers))
    text = f"a process of this user may open {hard} files, and a worker needs up to {needed}"
    if hard < needed:
        return warning(text, f"raise the hard limit (LimitNOFILE, ulimit -Hn) to {needed}")
    return ok(text)


def disk(case: Case) -> Diagnosis:
    """Look at the free space of the files of this machine."""
    urls = (case.coordinator_url, case.broker_url)
    paths = [
        url.removeprefix("sqlite:").partition("?")[0] for url in urls if url.startswith("sqlite:")
    ]
    folders = {os.path.dirname(os.path.abspath(path)) for path in paths}
    found = [(shutil.disk_usage(each).free, each) for each in folders if os.path.isdir(each)]
    if not found:
        return ok("neither messages nor progress are in a file of this machine")
    free, folder = min(found)
    text = f"{free / (1 << 30):.1f} GiB are free at {folder}"
    if free < LITTLE_BYTES:
        answer = failed if free < TOO_LITTLE_BYTES else warning
        return answer(text, "free disk space: sending stops when the disk is full")
    return ok(text)
