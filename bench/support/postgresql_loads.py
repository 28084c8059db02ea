"""Workers on full queues of PostgreSQL: who, how fast, and in which order."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.peers import common as tally
from bench.peers.catalog import Rival
from bench.support.postgresql_runs import (
    QDO,
    Bench,
    WorkerLoad,
    bare_rival,
    qdo_rival,
    worker_load,
)
from bench.support.statistics import Goal, Spread

QUEUES = 16
FETCH = 1000
BARE, PROCRASTINATE = "bare loop", "Procrastinate"
QDO_TWO = "qdo, 2 processes"
KEYED, KEY_QUEUES = "qdo, order by key", "qdo, a queue for each key"

LOAD_HEADER = (
    "program", "jobs/s", "best", "spread", "CPU us/job", "server CPU ms/1,000", "disordered",
    "qdo is", "set-up",
)  # fmt: skip


@dataclass(slots=True)
class LoadResult:
    """All runs of a program on full queues."""

    rival: Rival
    workers: int = 1
    mode: str = "tally"
    runs: list[WorkerLoad] = field(default_factory=list)

    @property
    def name(self) -> str:
        return (
            self.rival.name if self.workers == 1 else f"{self.rival.name}, {self.workers} processes"
        )

    @property
    def rate(self) -> float:
        """Median of the jobs per second; 0 if no run succeeded."""
        return statistics.median(run.rate for run in self.runs) if self.runs else 0.0


def load_entries(bench: Bench) -> list[LoadResult]:
    """Return who works off full queues, in turn."""
    total = bench.given.waiting
    queues = {"BENCH_QUEUES": str(QUEUES)}
    own = [
        LoadResult(bare_rival(BARE, "same rows and batches, ujson, no more", total, FETCH, QUEUES)),
        LoadResult(
            qdo_rival(QDO, "16 queues, qdo-worker, checkpoints every 0.2 s", total, (), queues)
        ),
        LoadResult(
            qdo_rival(QDO_TWO, "the same with --processes 2", total, ("--processes", "2"), queues)
        ),
    ]
    peers = [LoadResult(each, count) for each in bench.peers for count in (1, 2)]
    return [entry for entry in own if bench.wanted(entry.name)] + peers


def key_entries(bench: Bench) -> list[LoadResult]:
    """Return who keeps the order of each key."""
    total = bench.given.waiting
    keyed, queues = {"BENCH_KEYED": "1"}, {"BENCH_QUEUES": str(tally.KEYS)}
    own = [
        LoadResult(
            qdo_rival(KEYED, "1 queue, 100 keys, concurrency 100", total, (), keyed, "sqs:fifo"),
            mode="order",
        ),
        LoadResult(
            qdo_rival(KEY_QUEUES, "100 queues, order of the queue", total, (), queues), mode="order"
        ),
    ]
    peers = [
        replace(
            each,
            name=f"{each.name}, lock",
            how=f"100 locks, {each.how}",
            environment={"BENCH_LOCKS": "1"},
        )
        for each in bench.peers
        if each.name == PROCRASTINATE
    ]
    return own + [LoadResult(each, mode="order") for each in peers]


def run_loads(bench: Bench, entries: Sequence[LoadResult]) -> None:
    """Run each program as often as requested, in turn."""
    for run in range(bench.given.runs):
        for entry in entries:
            found = bench.noted(
                f"{entry.name}, run {run + 1} of {bench.given.runs}",
                lambda entry=entry: worker_load(
                    bench.server, entry.rival, bench.python, entry.workers, entry.mode
                ),
            )
            if found is not None:
                entry.runs.append(found)


def load_rows(entries: Sequence[LoadResult], own: str) -> list[tuple[str, ...]]:
    """Return the lines of a table of loads; `own` names qdo's entry, to compare with."""
    reference = next((entry.rate for entry in entries if entry.name == own), 0.0)
    lines: list[tuple[str, ...]] = []
    for entry in entries:
        if not entry.runs:
            lines.append((entry.name, "failed", *[""] * 6, entry.rival.how))
            continue
        spread = Spread.of_rates([run.rate for run in entry.runs])
        jobs = sum(run.jobs for run in entry.runs)
        lines.append(
            (
                entry.name,
                f"{spread.median:,.0f}",
                f"{spread.best:,.0f}",
                f"{spread.spread:.0%}",
                f"{1e6 * sum(run.cpu_seconds for run in entry.runs) / jobs:,.1f}",
                f"{1e6 * sum(run.server_cpu_seconds for run in entry.runs) / jobs:,.1f}",
                f"{sum(run.disordered for run in entry.runs):,}" if entry.mode == "order" else "",
                f"{reference / entry.rate:,.2f}x" if reference and entry.rate else "",
                entry.rival.how,
            )
        )
    return lines


def load_goals(entries: Sequence[LoadResult]) -> list[Goal]:
    """Return the goals of one worker process on full queues, as far as both sides were measured."""
    rates = {entry.name: entry.rate for entry in entries if entry.rate}
    if QDO not in rates:
        return []
    fastest = max(
        (
            entry.rate
            for entry in entries
            if not entry.name.startswith((QDO, BARE)) and entry.workers == 1
        ),
        default=0.0,
    )
    found = []
    if BARE in rates:
        found.append(Goal.at_least("qdo / bare loop", 0.5, rates[QDO] / rates[BARE]))
    if fastest:
        found.append(Goal.at_least("qdo / fastest other program", 20, rates[QDO] / fastest))
    return found


def key_goals(entries: Sequence[LoadResult]) -> list[Goal]:
    """Return the goals of ordered keys."""
    return [
        Goal.at_most(f"{entry.name}: jobs out of order", 0, run.disordered, ",.0f")
        for entry in entries
        for run in entry.runs
        if entry.name.startswith(QDO)
    ]
