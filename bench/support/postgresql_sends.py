"""Senders on PostgreSQL, alone and with a worker that waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.latency import LatencyPlan, LatencyResult, measure, measure_disk, timing
from bench.peers.catalog import Rival
from bench.support.postgresql_runs import QDO, Bench, SenderLoad, qdo_rival, sender_load, staged
from bench.support.processes import Program
from bench.support.statistics import Goal

SENDERS = (1, 4, 16)
BATCHES = (1, 100, 1000)
MANY = 1000
SEND_HEADER = ("program", "senders", "batch", "messages/s", "server CPU ms/1,000", "set-up")


def send_entries(bench: Bench) -> Iterator[tuple[Rival, int, int]]:
    """Yield the senders: the program, the number of processes, and the size of batches."""
    own = [
        qdo_rival(QDO, "a queue for each sender", 0),
        qdo_rival("qdo, one queue", "all senders to one queue", 0, (), {"BENCH_QUEUE": "shared"}),
    ]
    peers = [replace(each, how="") for each in bench.peers]  # that of their workers
    for rival in [each for each in own if bench.wanted(QDO)] + peers:
        if rival.sends:
            sizes = BATCHES if rival.batches else (1,)
            yield from ((rival, senders, size) for size in sizes for senders in SENDERS)
    if bench.wanted(QDO):
        threads = {"BENCH_THREADS": "16", "BENCH_QUEUE": "shared"}
        yield qdo_rival("qdo, 16 threads", "one process, one queue", 0, (), threads), 1, 1


def run_senders(bench: Bench) -> list[tuple[Rival, SenderLoad]]:
    """Measure all senders."""
    found = []
    for rival, senders, size in send_entries(bench):
        result = bench.noted(
            f"{rival.name}, {senders} senders, batches of {size:,}",
            lambda args=(senders, size), rival=rival: sender_load(
                bench.server, rival, bench.python, *args, bench.given.seconds
            ),
        )
        if result is not None:
            found.append((rival, result))
    return found


def send_row(rival: Rival, load: SenderLoad) -> tuple[str, ...]:
    """Return a line of the table of senders."""
    return (
        rival.name,
        str(load.senders),
        f"{load.batch:,}",
        f"{load.rate:,.0f}",
        f"{load.server_cpu_millis:,.1f}",
        rival.how,
    )


def run_latency(bench: Bench) -> list[LatencyResult]:
    """Measure from sending to the start of the job, with one message at a time."""
    plan = LatencyPlan(bench.given.samples, bench.given.idle_seconds)
    many = {"BENCH_QUEUES": str(MANY), "BENCH_READY": str(MANY)}
    own = [
        qdo_rival(QDO, "1 queue", 0),
        qdo_rival("qdo, 1,000 queues", "1,000 queues in turn", 0, (), many),
    ]
    disk = LatencyResult("(disk alone)", "4 KiB written and synced, nothing else")
    measure_disk(disk, plan)
    found = [disk]
    for rival in [each for each in own if bench.wanted(QDO)] + list(bench.peers):
        if rival.sends:
            entry = LatencyResult(rival.name, rival.how)
            found.append(entry)
            bench.noted(
                f"latency of {rival.name}",
                lambda rival=rival, entry=entry: latency(bench, rival, entry, plan),
            )
    return found


def latency(bench: Bench, rival: Rival, entry: LatencyResult, plan: LatencyPlan) -> None:
    """Measure one program."""
    own = rival.name.startswith(QDO)
    with staged(bench.server, rival, bench.python) as stage, timing(plan) as (_, pipe, environment):
        environment.update(stage.environment)
        command = rival.worker_command(bench.python)
        with Program(command, environment=environment) as worker:
            measure(
                entry,
                plan,
                worker,
                lambda count: rival.feed_command(
                    bench.python, "ready" if own and count == 1 else "send", count
                ),
                pipe,
                environment,
            )


def latency_goals(entries: Sequence[LatencyResult]) -> list[Goal]:
    """Return the goals of the latency."""
    return [
        Goal.at_most(f"{entry.name}: median ms from send to start", 3.0, entry.ages.median)
        for entry in entries
        if entry.ages is not None and entry.name.startswith(QDO)
    ]
