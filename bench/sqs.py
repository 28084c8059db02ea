"""The cost and the speed of consuming SQS queues: ``python -m bench.sqs``.

Everything in one run on the fast server of the tests, measured from that server's request log:

- one worker process on full queues: messages per second and requests per message, compared with a
  bare loop with boto3 (receive ten, call, delete ten) and Celery's SQS transport;
- the same consumers on empty queues: requests per queue and hour;
- one worker with many empty queues: processor time and memory.

Each process is the real program. qdo uses the embedded coordinator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.support import report, services
from bench.support.processes import ProgramError
from bench.support.sqs_runs import (
    Consumer,
    Load,
    Rest,
    bare_command,
    celery_command,
    load,
    qdo_command,
    rest,
)
from bench.support.statistics import Goal, Spread

BARE, BARE_FIFO, BARE_MANY = "bare loop", "bare loop, FIFO", "bare loop, 8 queues"
QDO, QDO_FIFO = "qdo", "qdo, FIFO"
QDO_MANY, QDO_FIFO_MANY = "qdo, 8 queues", "qdo, 8 FIFO queues"
CELERY = "Celery"
QUEUES = 8
IDLE = 1_000
FEW = 10
LONGER_SECONDS = 60

LOAD_HEADER = (
    "program", "messages/s", "best", "spread", "requests/message", "receives", "deletes", "other",
    "CPU us/message", "server's", "set-up",
)  # fmt: skip
REST_HEADER = (
    "program", "queues", "requests/queue/h", "receives", "% of a core", "MiB", "connections",
    "set-up",
)  # fmt: skip


def consumers(python: Path | None) -> list[Consumer]:
    """Return the consumers of full queues."""
    drain = bare_command("drain")
    found = [
        Consumer(BARE, "boto3, one thread", drain),
        Consumer(BARE_FIFO, "boto3, one thread, 100 groups", drain, fifo=True),
        Consumer(BARE_MANY, "boto3, one thread, queues in turn", drain, queues=QUEUES),
        Consumer(QDO, "order none", qdo_command("standard")),
        Consumer(QDO_FIFO, "order by key, 100 groups", qdo_command("fifo"), fifo=True),
        Consumer(QDO_MANY, "order none", qdo_command("standard"), queues=QUEUES),
        Consumer(QDO_FIFO_MANY, "order by key, 100 groups each", qdo_command("fifo"), True, QUEUES),
    ]
    if python is not None:
        found.append(
            Consumer(
                CELERY,
                "pool solo, prefetch without limit, results ignored, 3 ms per receive",
                celery_command(python, 1),
                messages=6_000,
                feed=(str(python), "-m", "bench.peers.with_celery_sqs"),
                # With a prefetch limit it pauses for a second whenever the limit is reached. It
                # may notice a response that arrives before it looks up to a second late, so
                # its server delays each receive.
                environment={"BENCH_PREFETCH": "0"},
                pause_seconds=0.003,
            )
        )
    return found


def resters(python: Path | None, idle: int) -> list[Consumer]:
    """Return the consumers of empty queues."""
    patient = qdo_command("standard", f"&idle_seconds={LONGER_SECONDS}")
    few = min(FEW, idle)
    found = [
        Consumer(
            "bare loop", "long polls of 20 s, a thread each", bare_command("idle"), queues=few
        ),
        Consumer(
            "qdo", "defaults: long polls and pauses of 20 s", qdo_command("standard"), queues=idle
        ),
        Consumer(f"qdo, idle_seconds={LONGER_SECONDS}", "longer pauses", patient, queues=idle),
    ]
    if python is not None:
        how = "defaults: long polls of 10 s, pauses of 1 s"
        found.append(Consumer(CELERY, how, celery_command(python, few), queues=few))
    return found


# --- tables and goals -------------------------------------------------------------------


def load_row(consumer: Consumer, runs: Sequence[Load]) -> tuple[str, ...]:
    """Return a line of the first table, with the figures of the run with the median rate."""
    if not runs:
        return (consumer.name, "failed", *[""] * (len(LOAD_HEADER) - 3), consumer.how)
    spread = Spread.of_rates([run.rate for run in runs])
    typical = middle(runs)
    asked = typical.requests
    return (
        consumer.name,
        f"{spread.median:,.0f}",
        f"{spread.best:,.0f}",
        f"{spread.spread:.0%}",
        f"{asked.requests:.3f}",
        f"{asked.receives:.3f}",
        f"{asked.deletes:.3f}",
        f"{asked.holds + asked.other:.3f}",
        f"{1e6 * typical.cpu_seconds / typical.jobs:,.0f}",
        f"{1e6 * typical.server_cpu_seconds / typical.jobs:,.0f}",
        consumer.how,
    )


def middle(runs: Sequence[Load]) -> Load:
    """Return the run with the median rate, or the better one of the middle two."""
    return sorted(runs, key=lambda run: run.rate)[len(runs) // 2]


def rest_row(consumer: Consumer, found: Rest | None) -> tuple[str, ...]:
    """Return a line of the second table."""
    if found is None:
        return (consumer.name, "failed", *[""] * (len(REST_HEADER) - 3), consumer.how)
    return (
        consumer.name,
        f"{found.queues:,}",
        f"{found.per_queue_hour:,.1f}",
        f"{found.receives_per_queue_hour:,.1f}",
        f"{found.cpu_percent:.2f}",
        f"{found.memory_bytes / 2**20:,.0f}",
        f"{found.connections:,}",
        consumer.how,
    )


def goals(loads: Mapping[str, Sequence[Load]], rests: Mapping[str, Rest]) -> list[Goal]:
    """Return the goals of qdo, as far as both sides were measured."""
    rates = {
        name: Spread.of_rates([run.rate for run in runs]).median
        for name, runs in loads.items()
        if runs
    }
    found = [
        Goal.at_most(f"{name}: requests/message", 0.205, middle(loads[name]).requests.requests,
                     ".3f")
        for name in (QDO, QDO_FIFO, QDO_MANY, QDO_FIFO_MANY)
        if name in rates
    ]  # fmt: skip
    pairs = [
        (QDO, BARE, 0.9), (QDO_FIFO, BARE_FIFO, 0.9), (QDO_MANY, BARE, 1.0),
        (QDO_FIFO_MANY, BARE_FIFO, 1.0), (QDO, CELERY, 1.0),
    ]  # fmt: skip
    found += [
        Goal.at_least(f"{own} / {other}, messages/s", least, rates[own] / rates[other])
        for own, other, least in pairs
        if own in rates and other in rates
    ]
    if "qdo" in rests:
        many = rests["qdo"]
        found += [
            Goal.at_most(f"{many.queues:,} idle queues: % of a core", 5, many.cpu_percent),
            Goal.at_most(
                f"{many.queues:,} idle queues: MiB", 300, many.memory_bytes / 2**20, ",.0f"
            ),
            Goal.at_most("receives/idle queue/h", 100, many.receives_per_queue_hour, ",.1f"),
        ]
    return found


# --- the command ------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.sqs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run with few messages")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--idle", type=int, default=IDLE, help="number of empty queues of one worker"
    )
    parser.add_argument(
        "--warm-up", type=float, default=240.0, help="seconds until pauses have their full length"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="seconds that are counted")
    parser.add_argument("--only", choices=("load", "rest"), help="one half of it")
    parser.add_argument("--no-peers", action="store_true", help="only qdo and the bare loop")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    if given.quick:
        given.messages, given.runs, given.idle = 2_000, 1, 20
        given.warm_up, given.seconds = 1.0, 5.0
    return given


def measured_loads(
    wanted: Iterable[Consumer], given: argparse.Namespace, failures: list[str]
) -> dict[str, list[Load]]:
    """Return the runs of each consumer, in turn."""
    wanted = list(wanted)
    found: dict[str, list[Load]] = {consumer.name: [] for consumer in wanted}
    for run in range(given.runs):
        for consumer in wanted:
            report.say(f"{consumer.name}, run {run + 1} of {given.runs}")
            total = min(consumer.messages or given.messages, given.messages)
            try:
                found[consumer.name].append(load(consumer, total))
            except ProgramError as error:
                failures.append(f"{consumer.name}: {error}")
    return found


def measured_rests(
    wanted: Iterable[Consumer], given: argparse.Namespace, failures: list[str]
) -> dict[str, Rest]:
    """Return the idle figures of all consumers, which run at once, each with its own server."""
    found = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        begun = []
        for consumer in wanted:
            report.say(f"{consumer.name}, {consumer.queues:,} empty queues")
            begun.append((consumer, pool.submit(rest, consumer, given.warm_up, given.seconds)))
        for consumer, result in begun:
            try:
                found[consumer.name] = result.result()
            except ProgramError as error:
                failures.append(f"{consumer.name}: {error}")
    return found


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    failures: list[str] = []
    loads: dict[str, list[Load]] = {}
    rests: dict[str, Rest] = {}
    if given.only != "rest":
        wanted = consumers(python)
        loads = measured_loads(wanted, given, failures)
        rows = [load_row(each, loads[each.name]) for each in wanted]
        print(report.table(LOAD_HEADER, rows, left=("set-up",)))
    if given.only != "load":
        wanted = resters(python, given.idle)
        rests = measured_rests(wanted, given, failures)
        rows = [rest_row(each, rests.get(each.name)) for each in wanted]
        print(report.table(REST_HEADER, rows, left=("set-up",)))
        print(f"an hour is extrapolated from {given.seconds:g} s")
    for failure in failures:
        print(failure)
    result: dict[str, Any] = {
        "machine": described,
        "versions": report.versions(("boto3", "botocore", "gevent", "ujson")),
        "peers": report.versions(("celery", "kombu", "boto3"), python) if python else {},
        "messages": given.messages,
        "loads": loads,
        "rests": rests,
    }
    judged = [] if given.quick else goals(loads, rests)
    return report.finish("sqs", result, judged, bool(failures))


if __name__ == "__main__":
    sys.exit(main())
