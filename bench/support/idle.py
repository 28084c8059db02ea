"""What idle workers cost a coordinator, and how soon a new fleet works."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.support.processes import Program, ProgramError, tree
from bench.support.services import CoordinatorService
from bench.throughput import WORKER
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from tests.support.paths import ROOT

WORKERS = 20
PATIENCE_SECONDS = 60.0
IDLE_HEADER = (
    *("20 idle workers on", "start s", "server CPU ms/s", "all workers ms/s"),
    "log MB/hour",
)
_JOB = "def job(message, context):\n    pass\n"
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class IdleCost:
    """The cost of 20 worker processes that have no messages.

    :ivar start_seconds: from the start of the fleet on an empty tree until 20 workers are
        registered.
    :ivar server_share: processor seconds of the server in each second.
    :ivar worker_share: those of all workers.
    :ivar log_bytes: bytes of the server's log in an hour, 0 if unknown.
    """

    system: str
    start_seconds: float
    server_share: float
    worker_share: float
    log_bytes: float

    def row(self) -> tuple[str, ...]:
        """Return one line of the table."""
        return (
            self.system,
            f"{self.start_seconds:.1f}",
            f"{1000 * self.server_share:.1f}",
            f"{1000 * self.worker_share:.1f}",
            f"{self.log_bytes / 1e6:.1f}" if self.log_bytes else "-",
        )


def measure_idle(service: CoordinatorService, seconds: float) -> IdleCost:
    """Start workers, wait until they are idle, and look at their processes for some time."""
    url = service.fresh("idle")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "idle_jobs.py").write_text(_JOB)
        environment = {
            "QDO_APP": "idle",
            "QDO_JOB": "idle_jobs:job",
            "QDO_BROKER": f"sqlite:{folder}/messages.db",
            "QDO_COORDINATOR": url,
            "PYTHONPATH": f"{folder}:{ROOT}",
        }
        began = time.monotonic()
        command = [*WORKER, "--processes", str(WORKERS)]
        with Program(command, environment=environment, folder=folder) as fleet:
            _wait_registered(url)
            start = time.monotonic() - began
            time.sleep(5.0)  # until the first plans are carried out
            workers = [pid for pid, _ in tree(fleet.process.pid)]
            before = _cpu(service.pids()), _cpu(workers), service.written(), time.monotonic()
            time.sleep(seconds)
            passed = time.monotonic() - before[3]
            return IdleCost(
                service.name,
                start,
                (_cpu(service.pids()) - before[0]) / passed,
                (_cpu(workers) - before[1]) / passed,
                (service.written() - before[2]) / passed * 3600,
            )


def _wait_registered(url: str) -> None:
    client = connect(url)
    client.open(15.0)
    try:
        limit = time.monotonic() + PATIENCE_SECONDS
        path = Layout.of("idle").workers
        while not client.exists(path) or len(client.get_children(path)) < WORKERS:
            if time.monotonic() > limit:
                raise ProgramError(f"not {WORKERS} workers within {PATIENCE_SECONDS:g} s")
            time.sleep(0.02)
    finally:
        client.stop()
        client.close()


def _cpu(pids: list[int]) -> float:
    """Return the processor seconds of processes that live."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total * _TICK
