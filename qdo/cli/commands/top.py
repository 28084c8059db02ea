"""`qdo top`: the app on one live screen."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import require_app, with_settings
from qdo.cli.output import approximate, cell, emit, parse_duration
from qdo.cli.readings import SHARED, rules_of, verdict_options, watch_screen
from qdo.errors import UsageError
from qdo.ops.items import QUEUE_SORTS, Judged, overview, queue_item
from qdo.ops.status import Statuses, queue_statuses
from qdo.ops.verdicts import VerdictRules, judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.settings.settings import Settings
from qdo.text import pluralize, short_duration

QUEUES, WORKERS = 12, 4
"""How many are listed: a screen of 24 lines has room for them."""
READINGS = 16
"""How many readings the verdicts on the trend are based on."""
_QUEUE_COLUMNS = {
    "queue": "QUEUE",
    "state": "STATE",
    "owner": "OWNER",
    "backlog": "BACKLOG",
    "age": "AGE",
    "reason": "WHY",
}
_WORKER_COLUMNS = {
    "worker": "WORKER",
    "queues": "QUEUES",
    "busy": "BUSY",
    "rate": "MESSAGES/S",
    "reported": "REPORTED",
    "host": "HOST",
}


@click.command()
@click.argument("glob", default="*")
@click.option(
    "--every", metavar="DURATION", default="2s", show_default=True, help="How often it looks."
)
@verdict_options
@with_settings(*SHARED)
def top(glob: str, every: str, late: str, stuck: str, settings: Settings) -> None:
    """Show the worst queues that match GLOB and the busiest workers, live, until you type q.

    The screen needs a terminal. It only reads: as much as `qdo queues` does, at each look. It
    compares each look with that half a minute ago. The rate of a worker is the mean since the
    report before its last one.
    """
    require_app(settings)
    rules, seconds = rules_of(late, stuck), parse_duration(every, "--every")
    if seconds < 1:
        raise UsageError(reason=f"--every must be at least 1s, got {every!r}")
    if not sys.stdout.isatty():
        raise UsageError(reason="qdo top needs a terminal; `qdo status -o json` is for programs")
    screen = _Screen(settings, glob, rules)
    watch_screen(screen.show, seconds)


class _Screen:
    """Keeps what earlier looks have seen, for trends and rates."""

    def __init__(self, settings: Settings, glob: str, rules: VerdictRules) -> None:
        self._settings = settings
        self._glob = glob
        self._rules = rules
        self._readings: deque[Statuses] = deque(maxlen=READINGS)
        self._counts: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    def show(self) -> None:
        with open_connections(self._settings) as connections:
            client, layout = connections.client, connections.layout
            fault = connections.broker_fault
            broker = connections.broker
            reading = queue_statuses(client, layout, broker, self._glob, fault=fault)
            workers = worker_statuses(client, layout) if client else []
        self._readings.append(reading)
        judged = judge_all([self._readings[0], reading], self._rules)
        self._count(workers)
        self._print(judged, workers)

    def _count(self, workers: Sequence[WorkerStatus]) -> None:
        """Compute the rates of workers that have reported since the last look."""
        for each in workers:
            done, at = each.report.processed, each.reported
            if done is None:
                continue
            before, count = self._counts.get(each.worker, (at, done))
            if at > before:
                self._rates[each.worker] = max(0, done - count) / (at - before)
            self._counts[each.worker] = at, done

    def _print(self, judged: Judged, workers: Sequence[WorkerStatus]) -> None:
        item = overview(self._settings.app or "", workers, judged)
        states = ", ".join(f"{count} {state}" for state, count in item["states"].items())
        rates = [self._rates[each.worker] for each in workers if each.worker in self._rates]
        rate = f", {sum(rates):,.0f} messages/s" if rates else ""
        counted = f"{pluralize(len(workers), 'worker')}, {pluralize(len(judged), 'queue')}"
        print(f"app {cell(item['app'])}: {counted}{rate}")
        print(f"{states or 'nothing yet'}\n")
        wanted = [each for each in judged if each[1].state.needs_attention or each[0].backlog]
        worst = sorted(wanted, key=QUEUE_SORTS["state"])[:QUEUES]
        emit("", [_queue_row(queue_item(*each)) for each in worst], "table", _QUEUE_COLUMNS)
        print()
        rows = sorted(map(self._worker_row, workers), key=lambda row: -row["busy"])
        emit("", rows[:WORKERS], "table", _WORKER_COLUMNS)

    def _worker_row(self, each: WorkerStatus) -> dict[str, Any]:
        busy, rate = each.report.busy, self._rates.get(each.worker)
        return {
            "worker": each.worker,
            "queues": each.queues,
            "busy": busy or 0,
            "rate": None if rate is None else round(rate),
            "reported": f"{short_duration(max(0.0, time.time() - each.reported))} ago",
            "host": each.report.host,
        }


def _queue_row(item: dict[str, Any]) -> dict[str, Any]:
    seconds = item["behind_seconds"]
    age = None if seconds is None else short_duration(seconds)
    backlog = approximate(item["backlog"], item["approximate"])
    return {**item, "age": age, "backlog": backlog}
