"""How soon a job starts after its message is sent: ``python -m bench.latency``.

One process sends and another one works; both are idle otherwise. There is a message every 5 to
50 ms, at random. The age of a message counts from just before the call that sends it to the start
of its job, on one clock. So for qdo it includes making the message durable (Redis keeps it in
memory only). Then the benchmark measures the processor time of all processes of the idle worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.peers import catalog as rivals
from bench.peers import common as tally
from bench.peers.catalog import Rival
from bench.support import report, services
from bench.support.processes import Program, ProgramError, Report, idle_percent
from bench.support.statistics import Ages, Goal
from bench.throughput import WORKER

START_SECONDS = 60.0
Feed = Callable[[int], list[str]]
"""Returns the command that sends a number of messages."""


@dataclass(slots=True)
class LatencyResult:
    """The results of one program."""

    name: str
    how: str
    ages: Ages | None = None
    idle: float = 0.0
    failure: str | None = None
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """The number of messages and the durations."""

    samples: int
    idle_seconds: float

    @property
    def messages(self) -> int:
        return self.samples + tally.WARM_UP

    @property
    def patience_seconds(self) -> float:
        return START_SECONDS + 0.1 * self.messages


@contextlib.contextmanager
def timing(plan: LatencyPlan) -> Iterator[tuple[Path, Report, dict[str, str]]]:
    """Yield a folder, the pipe for the report of a run, and the environment with its path."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Report(Path(name)) as pipe:
        yield (
            Path(name),
            pipe,
            {
                "BENCH_MODE": "time",
                "BENCH_TOTAL": str(plan.messages),
                "BENCH_REPORT": str(pipe.path),
            },
        )


def measure(
    entry: LatencyResult,
    plan: LatencyPlan,
    worker: Program,
    feed: Feed,
    pipe: Report,
    env: dict[str, str],
) -> None:
    """Send one message to detect that the worker is ready, then all others; then let it idle."""
    with Program(feed(1), environment=env):
        pipe.read(START_SECONDS, worker)
    with Program(feed(plan.messages), environment=env) as sender:
        found = pipe.read(plan.patience_seconds, worker)
        sender.wait(START_SECONDS)
    entry.samples = found["ages"]
    entry.ages = Ages.of_seconds(entry.samples)
    entry.idle = idle_percent(worker.pid, plan.idle_seconds)


def measure_qdo(entry: LatencyResult, plan: LatencyPlan) -> None:
    """Measure qdo with the embedded broker and the embedded coordinator."""
    with timing(plan) as (folder, pipe, environment):
        broker = f"sqlite:{folder}/messages.db"
        command = [*WORKER, "bench.apps.noop:app", "--broker", broker]
        command += ["--coordinator", f"sqlite:{folder}/coordination.db"]
        with Program(command, environment=environment) as worker:
            measure(
                entry,
                plan,
                worker,
                lambda count: [sys.executable, "-m", "bench.support.sender", broker, str(count)],
                pipe,
                environment,
            )


def measure_rival(entry: LatencyResult, plan: LatencyPlan, rival: Rival, python: Path) -> None:
    """Measure a program on Redis."""
    with services.redis(rival.durable) as url, timing(plan) as (_, pipe, environment):
        environment.update({"BENCH_REDIS": url, **rival.environment})
        with Program(rival.worker_command(python), environment=environment) as worker:
            measure(
                entry,
                plan,
                worker,
                lambda count: rival.feed_command(python, "send", count),
                pipe,
                environment,
            )


def measure_disk(entry: LatencyResult, plan: LatencyPlan) -> None:
    """Measure the lower limit of a durable send."""
    with tempfile.NamedTemporaryFile(prefix="bench-", buffering=0) as file:
        for pause in tally.pauses(plan.messages):
            time.sleep(pause)
            began = time.monotonic()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            entry.samples.append(time.monotonic() - began)
    entry.ages = Ages.of_seconds(entry.samples)


# --- the command ------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run with few messages")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--no-peers", action="store_true", help="qdo alone")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    if given.quick:
        given.samples, given.idle_seconds = 50, 2.0
    return given


def main() -> int:
    """Measure, print and write the JSON."""
    given = arguments()
    described = report.machine()
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    plan = LatencyPlan(given.samples, given.idle_seconds)
    own = LatencyResult("qdo", "embedded broker and coordinator, durable send, 1 process")
    disk = LatencyResult("(disk alone)", "4 KiB written and synced, nothing else")
    entries = [own, disk]
    report.say("disk")
    measure_disk(disk, plan)
    report.say("qdo")
    with _noted(own):
        measure_qdo(own, plan)
    for rival in rivals.REDIS_LATENCY if python else ():
        report.say(rival.name)
        entry = LatencyResult(rival.name, f"Redis, {rival.how}")
        entries.append(entry)
        with _noted(entry):
            measure_rival(entry, plan, rival, python or Path())
    print(report.table(HEADER, [row(entry) for entry in entries], left=("set-up",)))
    for entry in entries:
        if entry.failure:
            print(f"{entry.name} failed: {entry.failure}")
    result = {
        "machine": described,
        "versions": report.versions(("ujson", "gevent", "kazoo")),
        "peers": report.versions(services.peer_names(), python) if python else {},
        "programs": [asdict(entry) for entry in entries],
    }
    failed = any(entry.failure for entry in entries)
    return report.finish("latency", result, [] if given.quick else goals(own), failed)


@contextlib.contextmanager
def _noted(entry: LatencyResult) -> Iterator[None]:
    """Report why a program could not be measured, and continue with the next."""
    try:
        yield
    except ProgramError as error:
        entry.failure = str(error)
        report.say(f"{entry.name}: {error}")


HEADER = ("program", "samples", "median ms", "99 % ms", "longest ms", "idle % of a core", "set-up")


def row(entry: LatencyResult) -> tuple[str, ...]:
    """Return one line of the table."""
    if entry.ages is None:
        return (entry.name, "failed", "", "", "", "", entry.how)
    ages = entry.ages
    figures = (f"{ages.median:.2f}", f"{ages.p99:.2f}", f"{ages.longest:.2f}")
    return (entry.name, f"{ages.samples:,}", *figures, f"{entry.idle:.2f}", entry.how)


def goals(own: LatencyResult) -> list[Goal]:
    """Return the goals of qdo."""
    if own.ages is None:
        return [Goal("qdo was measured", "yes", "no", False)]
    return [
        Goal.at_most("median ms from send to start", 2.0, own.ages.median),
        Goal.at_most("99 % ms from send to start", 10.0, own.ages.p99),
        Goal.at_most("idle worker, % of a core", 2.0, own.idle),
    ]


if __name__ == "__main__":
    sys.exit(main())
