"""Runs on the fast SQS server of the tests: the server, its queues and their consumers."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers import common as tally
from bench.support.processes import Program, ProgramError, cpu_seconds, tree
from bench.support.sqs_traffic import DELETING, RECEIVING, PerMessage, SqsTraffic, per_queue_hour
from bench.throughput import PATIENCE_SECONDS, WORKER, counting
from tests.support.aws.clients import client, surroundings
from tests.support.aws.server_process import ServerProcess, serving

GROUPS = 100
"""Message groups of a FIFO queue."""
BATCH = 10
SETTLE_SECONDS = 30.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Consumer:
    """A program that consumes queues of SQS.

    :ivar command: returns its command from the endpoint, the prefix, the URLs of the queues and
        a folder for its files.
    :ivar feed: fills its only queue itself, because its messages have their own format.
    """

    name: str
    how: str
    command: Callable[[str, str, Sequence[str], Path], list[str]]
    fifo: bool = False
    queues: int = 1
    messages: int | None = None
    feed: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    pause_seconds: float = 0.0
    """How long the server waits before each receive."""


@contextlib.contextmanager
def server(pause_seconds: float = 0.0) -> Iterator[ServerProcess]:
    """Run a separate server, so that each measurement has its own log.

    :param pause_seconds: before each receive.
    """
    with serving("tests.support.aws.sqs_server", "--pause", str(pause_seconds)) as process:
        yield process


def traffic(stub: ServerProcess) -> SqsTraffic:
    """Return the requests to the server so far."""
    return SqsTraffic.of(stub.ask("/_log")["requests"])


def bare_command(way: str) -> Callable[[str, str, Sequence[str], Path], list[str]]:
    """Return the command of the bare loop."""
    return lambda endpoint, prefix, urls, folder: [
        sys.executable, "-m", "bench.baselines.bare_sqs_loop", endpoint, way, *urls,
    ]  # fmt: skip


def qdo_command(
    app: str, options: str = ""
) -> Callable[[str, str, Sequence[str], Path], list[str]]:
    """Return the command of qdo's worker: one process with its own coordinator."""
    return lambda endpoint, prefix, urls, folder: [
        *WORKER,
        f"bench.apps.sqs:{app}",
        "--broker",
        f"sqs://us-east-1/{prefix}?endpoint={endpoint}{options}",
        "--coordinator",
        f"sqlite:{folder}/coordination.db",
    ]


def celery_command(
    python: Path, queues: int
) -> Callable[[str, str, Sequence[str], Path], list[str]]:
    """Return the command of Celery's worker, in the peers' environment."""
    names = ",".join(tally.queue_name(number) for number in range(queues))
    return lambda endpoint, prefix, urls, folder: [
        str(python.parent / "celery"), "-A", "bench.peers.with_celery_sqs", "worker",
        "--loglevel", "WARNING", "--pool", "solo", "--concurrency", "1", "--queues", names,
        "--without-gossip", "--without-mingle", "--without-heartbeat",
    ]  # fmt: skip


def make_queues(endpoint: str, prefix: str, count: int, fifo: bool) -> list[str]:
    """Create queues and return their URLs."""
    sqs = client("sqs", endpoint)
    attributes = {"VisibilityTimeout": "600", **({"FifoQueue": "true"} if fifo else {})}
    ending = ".fifo" if fifo else ""
    return [
        sqs.create_queue(
            QueueName=f"{prefix}{tally.queue_name(number)}{ending}", Attributes=attributes
        )["QueueUrl"]
        for number in range(count)
    ]


def fill(endpoint: str, urls: Sequence[str], total: int, fifo: bool) -> None:
    """Send the compared bodies to queues in turn, ten at a time."""
    sqs = client("sqs", endpoint)
    for start in range(0, total, BATCH):
        url = urls[start // BATCH % len(urls)]
        entries = [_entry(number, fifo) for number in range(start, min(total, start + BATCH))]
        failed = sqs.send_message_batch(QueueUrl=url, Entries=entries).get("Failed")
        if failed:
            raise ProgramError(f"could not be sent: {failed}")


def _entry(number: int, fifo: bool) -> dict[str, str]:
    entry = {"Id": str(number), "MessageBody": tally.encoded(number).decode()}
    if fifo:
        entry["MessageGroupId"] = f"key-{number % GROUPS}"
        entry["MessageDeduplicationId"] = str(number)
    return entry


# --- under load


@dataclass(frozen=True, slots=True)
class Load:
    """One run of a consumer on full queues.

    :ivar cpu_seconds: of the worker process, from the first job to the last.
    :ivar server_cpu_seconds: of the server, from the worker's start to the last delete.
    """

    jobs: int
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    requests: PerMessage
    peak_connections: int

    @property
    def rate(self) -> float:
        """Messages a second, from the first job to the last."""
        return self.jobs / self.seconds


def load(consumer: Consumer, total: int) -> Load:
    """Fill queues, run the consumer, and count until all messages are deleted."""
    prefix = "load-"
    with (
        server(consumer.pause_seconds) as stub,
        counting(total) as (pipe, environment),
        scratch() as folder,
    ):
        environment |= {**_meaning(), "BENCH_SQS": stub.url, "BENCH_PREFIX": prefix}
        environment |= consumer.environment or {}
        urls = make_queues(stub.url, prefix, consumer.queues, consumer.fifo)
        if consumer.feed:
            command = [*consumer.feed, "fill", str(total)]
            with Program(command, environment=environment) as feed:
                feed.wait(PATIENCE_SECONDS)
        else:
            fill(stub.url, urls, total, consumer.fifo)
        before, spent = traffic(stub), cpu_seconds(stub.pid)
        command = consumer.command(stub.url, prefix, urls, folder)
        with Program(command, environment=environment) as program:
            found = pipe.read(PATIENCE_SECONDS, program)
            after = _settled(stub, before, total, program)
            served = cpu_seconds(stub.pid) - spent
            peak = stub.ask("/_log")["connections"]["peak"]
    return Load(
        jobs=int(found["jobs"]),
        seconds=found["seconds"],
        cpu_seconds=float(found["cpu_seconds"]),
        server_cpu_seconds=served,
        requests=PerMessage.of(after),
        peak_connections=peak,
    )


def _meaning() -> dict[str, str]:
    names = {name for name in surroundings() if name.startswith(("AWS_", "NO_PROXY"))}
    return {name: surroundings()[name] for name in names}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder for a coordinator's file."""
    with tempfile.TemporaryDirectory(prefix="bench-sqs-") as name:
        yield Path(name)


def _settled(stub: ServerProcess, before: SqsTraffic, total: int, program: Program) -> SqsTraffic:
    """Return the traffic once all messages are deleted, which may be after the last job."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = traffic(stub).since(before)
        deleted = found.total(DELETING).entries
        if deleted >= total:
            return found
        if time.monotonic() > deadline:
            raise program.failure(f"deleted {deleted} of {total} messages")
        time.sleep(0.1)


# --- at rest


@dataclass(frozen=True, slots=True)
class Rest:
    """The figures of a consumer of empty queues.

    :ivar per_queue_hour: requests, extrapolated from `seconds`.
    :ivar receives_per_queue_hour: those of them that are receives.
    :ivar cpu_percent: of a core, all processes together.
    :ivar memory_bytes: resident, of the largest process.
    :ivar all_memory_bytes: of all processes together; shared memory is counted in each.
    """

    queues: int
    seconds: float
    per_queue_hour: float
    receives_per_queue_hour: float
    cpu_percent: float
    memory_bytes: int
    all_memory_bytes: int
    connections: int


def rest(consumer: Consumer, warm_up_seconds: float, seconds: float) -> Rest:
    """Run a consumer of empty queues, and count once it polls all of them and has settled."""
    prefix = "rest-"
    with server() as stub, counting(1) as (_, environment), scratch() as folder:
        environment |= {**_meaning(), "BENCH_SQS": stub.url, "BENCH_PREFIX": prefix}
        urls = make_queues(stub.url, prefix, consumer.queues, consumer.fifo)
        stub.ask("/_reset_log", {})
        command = consumer.command(stub.url, prefix, urls, folder)
        with Program(command, environment=environment) as program:
            _all_polled(stub, prefix, consumer.queues, program)
            time.sleep(warm_up_seconds)
            before, spent, began = traffic(stub), cpu_seconds(program.pid), time.monotonic()
            time.sleep(seconds)
            took = time.monotonic() - began
            used = cpu_seconds(program.pid) - spent
            found = traffic(stub).since(before)
            sizes = [resident(pid) for pid, _ in tree(program.pid)]
            opened = stub.ask("/_log")["connections"]["open"]
            receives = SqsTraffic({key: each for key, each in found.counts.items()
                                if key[0] in RECEIVING})  # fmt: skip
    return Rest(
        queues=consumer.queues,
        seconds=took,
        per_queue_hour=per_queue_hour(found, consumer.queues, took),
        receives_per_queue_hour=per_queue_hour(receives, consumer.queues, took),
        cpu_percent=100 * used / took,
        memory_bytes=max(sizes, default=0),
        all_memory_bytes=sum(sizes),
        connections=opened,
    )


def _all_polled(stub: ServerProcess, prefix: str, queues: int, program: Program) -> None:
    """Wait until each queue has been received from."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (polled := traffic(stub).queues(prefix).busy_queues()) < queues:
        if time.monotonic() > deadline:
            raise program.failure(f"polled {polled} of {queues} queues")
        time.sleep(0.2)


def resident(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0
