"""Servers that a benchmark starts on free loopback ports, and stops."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.support.processes import Program, ProgramError
from bench.support.report import say
from tests.support.paths import ROOT
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlServer
from tests.support.processes import descendants
from tests.support.zookeeper import Ensemble

PEERS = ROOT / "bench" / ".venv-peers"
REQUIREMENTS = ROOT / "bench" / "requirements.txt"
POSTGRESQL_PEERS = ROOT / "bench" / ".venv-peers-postgresql"
POSTGRESQL_REQUIREMENTS = ROOT / "bench" / "requirements-postgresql.txt"
JAVA_OPTIONS = ("-Xms256m", "-Xmx1g")
"""Heap of a production server: it keeps its last 500 transactions in memory, and one that records
250 queues takes over 100 KB."""


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def redis(durable: bool = False) -> Iterator[str]:
    """Run redis-server and yield its URL.

    :param durable: sync to disk before every response. Otherwise Redis keeps everything in memory,
        which is usual for brokers.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        raise ProgramError("redis-server is missing: install the package redis-server")
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "yes" if durable else "no", "--appendfsync", "always"]
    with (
        tempfile.TemporaryDirectory(prefix="bench-redis-") as folder,
        Program(command, folder=Path(folder)) as server,
    ):
        _wait_for_port(server, port)
        yield f"redis://127.0.0.1:{port}/0"


def _wait_for_port(server: Program, port: int, timeout_seconds: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    ended = os.pidfd_open(server.pid)
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            if select.select([ended], [], [], 0.05)[0]:
                raise server.failure("ended at start")
    finally:
        os.close(ended)
    raise server.failure(f"opened no port within {timeout_seconds:g} s")


def peers_python(folder: Path = PEERS, requirements: Path = REQUIREMENTS) -> Path:
    """Return the Python of the peers' virtual environment, which is created at first use.

    :param folder: of the environment; without `requirements.stamp` it is created or completed.
    :param requirements: what it contains.
    """
    python = folder / "bin" / "python"
    stamp = folder / "requirements.stamp"
    wanted = requirements.read_text()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"installing the programs qdo is compared with into {folder}")
    venv.create(folder, with_pip=True)
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)],
        check=True,
        stdout=sys.stderr,
    )
    stamp.write_text(wanted)
    return python


def peer_names(requirements: Path = REQUIREMENTS) -> list[str]:
    """Return the names of the packages that qdo is compared with."""
    lines = requirements.read_text().splitlines()
    return [re.split(r"[\[<>=]", line)[0] for line in lines if not line.startswith("#")]


@contextlib.contextmanager
def zookeeper() -> Iterator[Ensemble]:
    """Run one ZooKeeper server."""
    with tempfile.TemporaryDirectory(prefix="bench-zookeeper-") as folder:
        ensemble = Ensemble(Path(folder), 1, JAVA_OPTIONS)
        ensemble.start()
        try:
            yield ensemble
        finally:
            ensemble.close()


@contextlib.contextmanager
def postgresql() -> Iterator[PostgresqlServer]:
    """Run one PostgreSQL server that syncs each commit, on the disk of the folder for files."""
    server = PostgresqlServer()
    server.start()
    try:
        yield server
    finally:
        server.close()


@dataclass(frozen=True, slots=True)
class CoordinatorService:
    """A coordinator that runs.

    :ivar fresh: returns the address of an empty tree; its argument names the tree.
    :ivar pids: returns the processes of the server, none for a file.
    :ivar written: returns the bytes of its log up to now, 0 if unknown.
    """

    name: str
    fresh: Callable[[str], str]
    pids: Callable[[], list[int]]
    written: Callable[[], int] = lambda: 0
    ensemble: Ensemble | None = None

    def traffic(self) -> ServerTraffic:
        return ServerTraffic(0, 0) if self.ensemble is None else ServerTraffic.of(self.ensemble)


COORDINATORS = ("zookeeper", "postgresql", "embedded")


@contextlib.contextmanager
def coordinator(kind: str) -> Iterator[CoordinatorService]:
    """Run a coordinator of one of the `COORDINATORS`."""
    if kind == "zookeeper":
        with zookeeper() as ensemble:
            pids = [server.pid for server in ensemble.servers]
            yield CoordinatorService(
                "qdo", lambda name: ensemble.url(f"/{name}"), lambda: pids, ensemble=ensemble
            )
    elif kind == "postgresql":
        with postgresql() as server:

            def fresh(name: str) -> str:
                return prepared(server.address.url(server.address.create_database()))

            def written() -> int:
                with server.address.connect() as connection:
                    query = "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"
                    return int((connection.execute(query).fetchone() or (0,))[0])

            yield CoordinatorService(
                "qdo on PostgreSQL", fresh, lambda: [server.pid, *descendants(server.pid)], written
            )
    else:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield CoordinatorService(
                "qdo, embedded", lambda name: f"sqlite:{folder}/{name}.db", list
            )


@dataclass(frozen=True, slots=True)
class ServerTraffic:
    """The counters of a ZooKeeper server.

    :ivar transactions: the counter of its zxid: all changes of its state.
    :ivar packets: requests of clients, including pings.
    """

    transactions: int
    packets: int

    @classmethod
    def of(cls, ensemble: Ensemble) -> ServerTraffic:
        server = ensemble.servers[0]
        zxid = _field(server.command("srvr"), "Zxid:")
        packets = _field(server.command("mntr"), "zk_packets_received")
        return cls(int(zxid, 16) & 0xFFFFFFFF, int(packets))

    def since(self, earlier: ServerTraffic) -> ServerTraffic:
        return ServerTraffic(
            self.transactions - earlier.transactions, self.packets - earlier.packets
        )


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        if line.startswith(name):
            return line[len(name) :].strip()
    raise ProgramError(f"ZooKeeper did not report {name}: {text[:200]!r}")
