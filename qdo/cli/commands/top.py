"""The live screen of `qdo status --watch`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from qdo.cli.connections import open_connections
from qdo.cli.output import ago, backlog_cells, cell, emit
from qdo.cli.readings import ReadOptions, read_statuses
from qdo.ops.items import QUEUE_SORTS, Judged, overview, queue_item
from qdo.ops.status import Statuses
from qdo.ops.verdicts import judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.settings.settings import Settings
from qdo.text import pluralize

# Maximum number of rows on a screen of 24 lines.
QUEUES = 12
WORKERS = 4
# Number of readings from which the screen computes trends.
READINGS = 16
_QUEUE_COLUMNS = ("queue", "state", "owner", "backlog", "age", "why")
_WORKER_COLUMNS = {
    "worker": "WORKER",
    "queues": "QUEUES",
    "busy": "BUSY",
    "rate": "MESSAGES/S",
    "reported": "REPORTED",
    "host": "HOST",
}


class Screen:
    """The live screen, with the readings for trends and rates."""

    def __init__(self, settings: Settings, glob: str, reading: ReadOptions) -> None:
        self._settings = settings
        self._glob = glob
        self._reading = reading
        self._readings: deque[Statuses] = deque(maxlen=READINGS)
        self._counts: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    def show(self) -> None:
        with open_connections(self._settings) as connections:
            reading = read_statuses(connections, self._glob, self._reading.budget)
            workers = worker_statuses(connections.client, connections.layout)
        self._readings.append(reading)
        judged = judge_all([self._readings[0], reading], self._reading.rules)
        self._count(workers)
        self._print(judged, workers)

    def _count(self, workers: Sequence[WorkerStatus]) -> None:
        """Compute the rates of workers that have reported since the last reading."""
        for each in workers:
            done = each.report.processed
            at = each.reported
            if done is None:
                continue
            before, count = self._counts.get(each.worker, (at, done))
            if at > before:
                self._rates[each.worker] = max(0, done - count) / (at - before)
            self._counts[each.worker] = (at, done)

    def _print(self, judged: Judged, workers: Sequence[WorkerStatus]) -> None:
        item = overview(self._settings.app or "", workers, judged)
        states = ", ".join(f"{count} {state}" for state, count in item["states"].items())
        rates = [self._rates[each.worker] for each in workers if each.worker in self._rates]
        rate = f", {sum(rates):,.0f} messages/s" if rates else ""
        counted = f"{pluralize(len(workers), 'worker')}, {pluralize(len(judged), 'queue')}"
        print(f"app {cell(item['app'])}: {counted}{rate}")
        print(f"{states or 'nothing yet'}\n")
        busy = [each for each in judged if each[1].state.needs_attention or each[0].backlog]
        worst = sorted(busy, key=QUEUE_SORTS["state"])[:QUEUES]
        items = [queue_item(*each) for each in worst]
        emit("", items, "table", _QUEUE_COLUMNS, cells=_queue_cells)
        print()
        rows = sorted(map(self._worker_row, workers), key=lambda row: -row["busy"])
        emit("", rows[:WORKERS], "table", _WORKER_COLUMNS)

    def _worker_row(self, each: WorkerStatus) -> dict[str, Any]:
        rate = self._rates.get(each.worker)
        return {
            "worker": each.worker,
            "queues": each.queues,
            "busy": each.report.busy or 0,
            "rate": None if rate is None else round(rate),
            "reported": ago(each.reported),
            "host": each.report.host,
        }


def _queue_cells(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**backlog_cells(item), "why": item["reason"]}
