"""How many jobs per second one worker process runs: ``python -m bench.throughput``.

A no-op job, bodies of 100 bytes of JSON, and 16 queues. All messages wait before the start. Counted
from the first job to the last. qdo runs as its users run it, with `qdo-worker`, the embedded broker
and checkpoints. It is compared with a bare loop over the same file, programs on Redis, and ordered
consumers on a mock Kafka broker. Everything runs in turn on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import qdo
from bench.peers import catalog as rivals
from bench.peers import common as tally
from bench.peers.catalog import Rival
from bench.support import report, services
from bench.support.processes import Program, ProgramError, Report
from bench.support.statistics import Goal, Spread
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode

APP = "bench"
QUEUES = 16
FETCH = 1000
SEND_BATCH = 10_000
PATIENCE_SECONDS = 120.0
WORKER = (sys.executable, "-c", "from qdo.cli.worker import main; main()")


@dataclass(slots=True)
class ThroughputRuns:
    """All runs of one program."""

    name: str
    family: str
    how: str
    rates: list[float] = field(default_factory=list)
    cpu_micros: list[float] = field(default_factory=list)
    failure: str | None = None
    judged: bool = True

    def add(self, found: dict[str, Any]) -> None:
        self.rates.append(found["jobs"] / found["seconds"])
        self.cpu_micros.append(1e6 * found["cpu_seconds"] / found["jobs"])

    @property
    def rate(self) -> float:
        """Median of the jobs per second; 0 if no run succeeded."""
        return statistics.median(self.rates) if self.rates else 0.0


@contextlib.contextmanager
def counting(total: int) -> Iterator[tuple[Report, dict[str, str]]]:
    """Yield the pipe for the report of a run, and the environment with its path."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Report(Path(folder)) as pipe:
        yield (
            pipe,
            {
                "BENCH_MODE": "count",
                "BENCH_TOTAL": str(total),
                "BENCH_REPORT": str(pipe.path),
                "BENCH_QUEUES": str(QUEUES),
            },
        )


# --- qdo and the bare loop --------------------------------------------------------------


def fill(folder: Path, total: int) -> None:
    """Send `total` messages to the embedded broker, in turn to each queue."""
    with qdo.App(APP, broker=f"sqlite:{folder / 'messages.db'}") as app:
        for start in range(0, total, SEND_BATCH):
            app.send_many(
                (tally.queue_name(number % QUEUES), tally.body(number))
                for number in range(start, min(total, start + SEND_BATCH))
            )


def run_bare(folder: Path, total: int) -> dict[str, Any]:
    """Run the bare loop once."""
    command = [
        sys.executable,
        "-m",
        "bench.baselines.bare_loop",
        str(folder / "messages.db"),
        str(FETCH),
    ]
    with counting(total) as (pipe, environment), Program(command, environment=environment) as loop:
        return pipe.read(PATIENCE_SECONDS, loop)


def run_qdo(folder: Path, total: int) -> dict[str, Any]:
    """Run qdo's worker once, until everything is processed and recorded."""
    with tempfile.TemporaryDirectory(prefix="bench-coordination-", dir=folder) as fresh:
        coordinator = f"sqlite:{fresh}/coordination.db"
        broker = f"sqlite:{folder / 'messages.db'}"
        command = [*WORKER, "bench.apps.noop:app", "--broker", broker]
        command += ["--coordinator", coordinator]
        with counting(total) as (pipe, environment):
            worker = Program(command, environment=environment)
            with worker:
                found = pipe.read(PATIENCE_SECONDS, worker)
        _check_recorded(broker, coordinator)
        return found


def _check_recorded(broker: str, coordinator: str) -> None:
    """Raise ProgramError unless the drained worker recorded that all messages are processed."""
    layout = Layout.of(APP)
    client = connect(coordinator)
    client.open(15.0)
    try:
        with qdo.App(APP, broker=broker) as app:
            for number in range(QUEUES):
                queue = tally.queue_name(number)
                data, _ = client.get(layout.queue(queue))
                left = app.broker.catalog.backlog(queue, QueueNode.parse(data).last).count
                if left:
                    raise ProgramError(f"{queue}: {left} messages are not recorded as processed")
    finally:
        client.stop()
        client.close()


# --- peers ------------------------------------------------------------------------------


def run_on_redis(rival: Rival, python: Path, total: int) -> dict[str, Any]:
    """Fill Redis, then run the worker of `rival` once."""
    with services.redis() as url, counting(total) as (pipe, environment):
        environment.update({"BENCH_REDIS": url, **rival.environment})
        with Program(rival.feed_command(python, "fill", total), environment=environment) as feed:
            feed.wait(PATIENCE_SECONDS)
        with Program(rival.worker_command(python), environment=environment) as worker:
            return pipe.read(PATIENCE_SECONDS, worker)


def run_on_kafka(rival: Rival, python: Path, total: int) -> dict[str, Any]:
    """Fill a mock Kafka broker, then run the consumer `rival` once."""
    with counting(total) as (pipe, environment):
        serve = rival.feed_command(python, "serve", total)
        with Program(serve, environment=environment, talk=True) as broker:
            state = json.loads(broker.read_line(PATIENCE_SECONDS))
            if state["stored"] != total:
                raise broker.failure(f"stored {state['stored']} of {total} messages")
            environment["BENCH_KAFKA"] = state["address"]
            with Program(rival.worker_command(python), environment=environment) as worker:
                return pipe.read(PATIENCE_SECONDS, worker)


# --- the command ------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run with few messages")
    parser.add_argument("--messages", type=int, default=1_600_000, help="for qdo")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", action="append", metavar="NAME", help="measure only this program")
    parser.add_argument("--no-peers", action="store_true", help="only qdo and the bare loop")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    if given.quick:
        given.messages, given.runs = 32_000, 1
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    entries = {
        "bare loop": ThroughputRuns("bare loop", "bare", "same file and batches, ujson, no more"),
        "qdo": ThroughputRuns("qdo", "qdo", "16 queues, qdo-worker, checkpoints every 0.2 s"),
    }
    peers = [("redis", rival) for rival in rivals.REDIS_THROUGHPUT]
    peers += [("kafka", rival) for rival in rivals.KAFKA]
    for family, rival in peers if python else ():
        entries[rival.name] = ThroughputRuns(rival.name, family, rival.how, judged=rival.judged)
    wanted = [name for name in entries if not given.only or name in given.only]
    with tempfile.TemporaryDirectory(prefix="bench-throughput-") as name:
        folder = Path(name)
        if {"qdo", "bare loop"} & set(wanted):
            report.say(f"sending {given.messages:,} messages")
            fill(folder, given.messages)
        for run in range(given.runs):
            for each in wanted:
                report.say(f"{each}, run {run + 1} of {given.runs}")
                try:
                    entries[each].add(_run(each, peers, folder, python, given))
                except ProgramError as error:
                    entries[each].failure = str(error)
                    report.say(f"{each}: {error}")
    shown = [entries[each] for each in wanted]
    print(report.table(HEADER, rows(shown), left=("set-up",)))
    for entry in shown:
        if entry.failure:
            print(f"{entry.name} failed: {entry.failure}")
    result = {
        "machine": described,
        "versions": report.versions(("ujson", "gevent", "kazoo")),
        "peers": report.versions(services.peer_names(), python) if python else {},
        "messages": given.messages,
        "queues": QUEUES,
        "programs": [{**asdict(entry), "rate": entry.rate} for entry in shown],
    }
    failed = any(entry.failure for entry in shown)
    return report.finish("throughput", result, [] if given.quick else goals(entries), failed)


def _run(
    name: str,
    peers: Sequence[tuple[str, Rival]],
    folder: Path,
    python: Path | None,
    given: argparse.Namespace,
) -> dict[str, Any]:
    if name == "bare loop":
        return run_bare(folder, given.messages)
    if name == "qdo" or python is None:
        return run_qdo(folder, given.messages)
    family, rival = next((family, rival) for family, rival in peers if rival.name == name)
    total = min(rival.messages, given.messages // 8) if given.quick else rival.messages
    run = run_on_redis if family == "redis" else run_on_kafka
    return run(rival, python, total)


HEADER = ("program", "jobs/s", "best", "spread", "CPU us/job", "qdo is", "set-up")


def rows(entries: Sequence[ThroughputRuns]) -> list[tuple[str, ...]]:
    """Return the lines of the table."""
    own = next((entry.rate for entry in entries if entry.name == "qdo"), 0.0)
    lines: list[tuple[str, ...]] = []
    for entry in entries:
        if not entry.rates:
            lines.append((entry.name, "failed", "", "", "", "", entry.how))
            continue
        spread = Spread.of_rates(entry.rates)
        cpu = statistics.median(entry.cpu_micros)
        times = f"{own / entry.rate:,.2f}x" if own else ""
        lines.append(
            (
                entry.name,
                f"{spread.median:,.0f}",
                f"{spread.best:,.0f}",
                f"{spread.spread:.0%}",
                f"{cpu:.2f}",
                times,
                entry.how,
            )
        )
    return lines


def goals(entries: dict[str, ThroughputRuns]) -> list[Goal]:
    """Return the goals of qdo, as far as both sides were measured."""
    own = entries["qdo"].rate
    if not own:
        return []
    found: list[Goal] = []
    bare = entries["bare loop"].rate
    if bare:
        found.append(Goal.at_least("qdo / bare loop", 0.4, own / bare))
    redis = max((entry.rate for entry in entries.values() if entry.family == "redis"), default=0)
    if redis:
        found.append(Goal.at_least("qdo / fastest program on Redis", 40, own / redis))
    found.extend(
        Goal.at_least(f"qdo / {entry.name}", 1, own / entry.rate)
        for entry in entries.values()
        if entry.family == "kafka" and entry.rate and entry.judged
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
