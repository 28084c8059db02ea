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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.support.processes import Program, ProgramError
from bench.support.report import say
from tests.support.paths import ROOT
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
