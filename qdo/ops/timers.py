"""Timers for commands, the dashboard and `qdo doctor`, and the doctor's check of outboxes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.timer_node import TimerNode, read_timers
from qdo.jobs.timers import Timer
from qdo.ops.dead_letters import ErrorGroup
from qdo.ops.doctor_case import Case, Diagnosis, ok, warning
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.text import iso_time, join_some, pluralize, short_duration

# If the time of a timer's last message is further in the future, a clock was wrong. The leader
# repairs the time.
AHEAD_SECONDS = 3600.0
# A new leader takes less time than this to send the message, even after the loss of a host.
OVERDUE_SECONDS = 30.0
OVERDUE_PERIODS = 5
# A timer with a short period is overdue after this many periods.
LEAST_OVERDUE_SECONDS = 10.0


def timer_items(
    nodes: Mapping[str, TimerNode], now: float, declared: Mapping[str, Timer] | None = None
) -> list[dict[str, Any]]:
    """Return the items of qdo.timers/1.

    :param declared: the timers of the app, or None if its code is unknown.
    """
    items = []
    for name in sorted({*nodes, *(declared or ())}):
        node = nodes.get(name, TimerNode(0))
        code = (declared or {}).get(name) or node
        fault = node.fault
        next_ = node.next if node.when else 0
        if fault is None and (node.when, node.queue) != (code.when, code.queue):
            fault = "the leader runs another version, or none runs"
        elif fault is None and node.refused:
            fault = f"refused: {node.refused}"
        elif fault is None and node.last > now + AHEAD_SECONDS:
            fault = f"its last time is ahead by {short_duration(node.last - now)}"
        elif fault is None and next_ and now - next_ > _patience(node):
            fault = f"overdue by {short_duration(now - next_)}"
        items.append(
            {
                "timer": name,
                "when": code.when or None,
                "next": iso_time(next_) if next_ else None,
                "last": iso_time(node.last) if node.last else None,
                "queue": code.queue,
                "by": node.by or None,
                "state": fault or ("ok" if node.when else "removed from the code"),
                "is_well": fault is None,
            }
        )
    return items


def _patience(node: TimerNode) -> float:
    periods = OVERDUE_PERIODS * (node.next - node.last)
    return min(OVERDUE_SECONDS, max(LEAST_OVERDUE_SECONDS, periods))


def failed_elsewhere(client: Client, layout: Layout, now: float) -> list[ErrorGroup]:
    """Return the failures of timers and of messages in outboxes, which are not dead letters."""
    timers = timer_items(read_timers(client, layout), now)
    bad = [each["state"] for each in timers if not each["is_well"]]
    groups = [ErrorGroup("timer", error, bad.count(error), bad.count(error)) for error in {*bad}]
    tables = refused_rows(worker_statuses(client, layout))
    if tables:
        error = "refused by the broker; `qdo admin outbox list` has the reasons"
        groups.append(ErrorGroup("outbox", error, sum(tables.values()), len(tables)))
    return sorted(groups, key=lambda group: (-group.count, group.error))


def refused_rows(workers: Sequence[WorkerStatus]) -> dict[str, int]:
    """Return the number of refused messages of each outbox table."""
    tables = [each.report.refused_rows or {} for each in workers]
    return {table: count for each in tables for table, count in each.items() if count > 0}


def check_timers(case: Case) -> Diagnosis:
    """Find timers that are overdue or refused, or have damaged nodes."""
    items = timer_items(read_timers(case.connected(), case.layout), time.time(), case.timers)
    bad = [f"{each['timer']} ({each['state']})" for each in items if not each["is_well"]]
    if bad:
        text = f"{pluralize(len(bad), 'timer')} cannot send: {join_some(bad)}"
        return warning(
            text, "correct what the reason says; overdue: start a worker, or see the leader's log"
        )
    return ok(f"{pluralize(len(items), 'timer')}; none is overdue")


def check_outboxes(case: Case) -> Diagnosis:
    """Find messages in outboxes that the broker refused."""
    tables = refused_rows(case.workers())
    if not tables:
        return ok("the broker refused no message of an outbox")
    count = pluralize(sum(tables.values()), "message")
    return warning(
        f"the broker refused {count}, which {join_some(sorted(tables))} keeps",
        "see `qdo admin outbox list` for the reasons; correct the cause and run `qdo admin outbox"
        " retry --all`, or `qdo admin outbox drop`",
    )
