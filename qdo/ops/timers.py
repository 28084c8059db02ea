"""Timers as commands, the dashboard and `qdo doctor` show them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from qdo.fleet.timer_node import TimerNode, read_timers
from qdo.jobs.timers import Timer
from qdo.ops.doctor_case import Case, Diagnosis, ok, warning
from qdo.text import iso_time, join_some, pluralize, short_duration

OVERDUE_SECONDS = 30.0
"""A new leader after a lost host is faster."""


def timer_items(
    nodes: Mapping[str, TimerNode], now: float, declared: Mapping[str, Timer] | None = None
) -> list[dict[str, Any]]:
    """Return the items of qdo.timers/1.

    :param declared: the timers of the app, None if its code is not known.
    """
    items = []
    for name in sorted({*nodes, *(declared or ())}):
        node, timer = nodes.get(name, TimerNode(0)), (declared or {}).get(name)
        code, fault, next_ = timer or node, node.fault, node.next if node.when else 0
        if fault is None and (node.when, node.queue) != (code.when, code.queue):
            fault = "the leader runs another version, or none runs"
        elif fault is None and next_ and now - next_ > OVERDUE_SECONDS:
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


def check_timers(case: Case) -> Diagnosis:
    """Look for timers that are overdue, or whose nodes are damaged."""
    found = timer_items(read_timers(case.connected(), case.layout), time.time(), case.timers)
    bad = [f"{each['timer']} ({each['state']})" for each in found if not each["is_well"]]
    if bad:
        text = f"{pluralize(len(bad), 'timer')} cannot send: {join_some(bad)}"
        return warning(text, "start a worker, or look for the reason in the log of the leader")
    return ok(f"{pluralize(len(found), 'timer')}; none is overdue")
