"""What all runs of `bench.postgresql` share: the server, databases on it, and the programs."""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.peers import common as tally
from bench.peers.catalog import POSTGRESQL, Rival
from bench.support import report
from bench.support.processes import Program, ProgramError, cpu_seconds, server_cpu_seconds
from bench.throughput import WORKER
from tests.support.postgresql.server import PostgresqlServer

SETTINGS = {"shared_buffers": "128MB", "max_connections": "200"}
"""The default buffers of PostgreSQL, and room for all connections. Commits wait for the disk."""
PATIENCE_SECONDS = 180.0
POLL_SECONDS = 0.005
NO_SYNC = {"PGOPTIONS": "-c synchronous_commit=off"}
"""Environment of those who fill queues before a measurement."""

QDO = "qdo"
SENDER = (sys.executable, "-m", "bench.support.postgresql_sender")
INIT = (sys.executable, "-c", "from qdo.cli.main import main; main()", "admin", "broker", "init")


def qdo_rival(
    name: str,
    how: str,
    messages: int,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    app: str = "noop:app",
) -> Rival:
    """Return qdo as one of the compared programs.

    :param options: of `qdo-worker`.
    :param app: a module of `bench.apps`, and the name of the app in it.
    """
    return Rival(
        name,
        (*WORKER, f"bench.apps.{app}", *options),
        SENDER,
        how,
        environment or {},
        messages,
        schema=INIT,
        batches=True,
    )


def bare_rival(name: str, how: str, messages: int, batch: int, queues: int) -> Rival:
    """Return the bare loop, which reads what qdo has sent."""
    return Rival(
        name,
        (sys.executable, "-m", "bench.baselines.bare_postgresql_loop", str(batch)),
        SENDER,
        how,
        {"BENCH_QUEUES": str(queues)},
        messages,
        schema=INIT,
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """The server of all runs, and what was asked for."""

    server: PostgresqlServer
    python: Path
    given: argparse.Namespace
    failures: list[str] = field(default_factory=list)

    @property
    def peers(self) -> Sequence[Rival]:
        """The other programs, with few messages for a smoke run."""
        if self.given.no_peers:
            return ()
        share = 10 if self.given.quick else 1
        return [
            replace(each, messages=each.messages // share)
            for each in POSTGRESQL
            if self.wanted(each.name)
        ]

    def wanted(self, name: str) -> bool:
        return not self.given.only or name in self.given.only

    def noted(self, what: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; report and remember why it failed, and return None."""
        report.say(what)
        try:
            return work()
        except ProgramError as error:
            self.failures.append(f"{what}: {error}")
            report.say(str(error))
            return None


@contextlib.contextmanager
def postgresql() -> Iterator[PostgresqlServer]:
    """Run a durable PostgreSQL server."""
    server = PostgresqlServer(settings=SETTINGS)
    try:
        server.start()
        yield server
    finally:
        server.close()


@dataclass(frozen=True, slots=True)
class StagedDatabase:
    """A database with the tables of a program, and the environment of its processes."""

    server: PostgresqlServer
    database: str
    python: Path
    folder: Path
    environment: Mapping[str, str]

    def run(self, command: list[str], **environment: str) -> None:
        """Run a command to its end."""
        with Program(command, environment={**self.environment, **environment}) as program:
            program.wait(PATIENCE_SECONDS)

    def execute(self, *statements: str) -> None:
        """Execute statements as superuser."""
        with self.server.address.connect(self.database) as connection:
            for statement in statements:
                connection.execute(statement)


@contextlib.contextmanager
def staged(server: PostgresqlServer, rival: Rival, python: Path) -> Iterator[StagedDatabase]:
    """Create a database with the tables of `rival`, and drop it at the end."""
    database = server.address.create_database()
    url = server.address.url(database)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-postgresql-") as name:
            environment = {
                "BENCH_POSTGRESQL": url,
                "PGDSN": url,  # of PgQueuer
                "QDO_BROKER": url,
                "QDO_COORDINATOR": f"sqlite:{name}/coordination.db",
                **rival.environment,
            }
            stage = StagedDatabase(server, database, python, Path(name), environment)
            schema = rival.schema_command(python)
            if schema is not None:
                stage.run(schema)
            yield stage
    finally:
        server.address.drop_database(database)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Jobs of full queues, counted from the first ones to the last.

    :ivar disordered: jobs that started after a later one of their key.
    """

    jobs: int
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    disordered: int

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds


def worker_load(
    server: PostgresqlServer,
    rival: Rival,
    python: Path,
    workers: int = 1,
    mode: str = "tally",
) -> WorkerLoad:
    """Let `workers` processes of a program work off its messages.

    :param mode: `BENCH_MODE` of `bench.peers.common`.
    """
    total = rival.messages
    with staged(server, rival, python) as stage, contextlib.ExitStack() as stack:
        stage.run(rival.feed_command(python, "fill", total), **NO_SYNC)
        stage.execute("VACUUM ANALYZE", "CHECKPOINT")
        counts = stage.folder / "tallies"
        counts.mkdir()
        environment = {**stage.environment, "BENCH_MODE": mode, "BENCH_TALLIES": str(counts)}
        programs = [
            stack.enter_context(Program(rival.worker_command(python), environment=environment))
            for _ in range(workers)
        ]
        first = _reached(1, counts, programs, server)
        last = _reached(total, counts, programs, server)
    return WorkerLoad(
        last.jobs - first.jobs,
        last.at - first.at,
        last.workers - first.workers,
        last.server - first.server,
        last.disordered,
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """What was done and spent at a time: jobs, and seconds of processor time."""

    at: float
    jobs: int
    disordered: int
    workers: float
    server: float


def _reached(
    wanted: int, counts: Path, programs: Sequence[Program], server: PostgresqlServer
) -> Moment:
    """Wait until `wanted` jobs have run."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        jobs, disordered = tally.tallies(counts)
        at = time.monotonic()
        if jobs >= wanted:
            workers = sum(cpu_seconds(program.pid) for program in programs)
            return Moment(at, jobs, disordered, workers, server_cpu_seconds(server.pid))
        for program in programs:
            if program.process.poll() is not None and tally.tallies(counts)[0] < wanted:
                raise program.failure(f"ended after {jobs:,} of {wanted:,} jobs")
        if at > deadline:
            raise programs[0].failure(f"{jobs:,} of {wanted:,} jobs in {PATIENCE_SECONDS:g} s")
        select.select([], [], [], POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class SenderLoad:
    """Durable sends.

    :ivar rate: messages per second of all senders.
    :ivar server_cpu_millis: processor time of the server per 1,000 messages, in milliseconds.
    """

    senders: int
    batch: int
    rate: float
    server_cpu_millis: float


def sender_load(
    server: PostgresqlServer,
    rival: Rival,
    python: Path,
    senders: int,
    batch: int,
    seconds: float,
) -> SenderLoad:
    """Let several processes send at once; there is no worker."""
    with staged(server, rival, python) as stage, contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(
                Program(
                    rival.feed_command(python, "blast", batch),
                    environment={**stage.environment, "BENCH_SENDER": str(number)},
                    talk=True,
                )
            )
            for number in range(senders)
        ]
        for program in programs:
            program.read_line(PATIENCE_SECONDS)
        before = server_cpu_seconds(server.pid)
        for program in programs:
            program.write_line(str(seconds))
        rate = sum(
            json.loads(program.read_line(seconds + PATIENCE_SECONDS))["rate"]
            for program in programs
        )
        spent = server_cpu_seconds(server.pid) - before
    return SenderLoad(senders, batch, rate, 1e6 * spent / (rate * seconds))
