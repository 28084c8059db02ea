"""Workers with different broker files do not run beside each other."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qdo.app import App
from tests.support.cli import QDO, WORKER, Ended, clean_environment, command
from tests.support.processes import Proc, wait_until

JOB = """
import os

def write(message, context):
    with open(os.environ["OUT"], "a") as file:
        file.write(f"{message.body}\\n")
"""


class TwoMachines:
    """Two folders that stand for machines, each with the default broker, on one coordinator."""

    def __init__(self, folder: Path, coordinator: str, stack: ExitStack) -> None:
        self.folders = [folder / "one", folder / "two"]
        self._out = folder / "out"
        self._stack = stack
        self._env = {"QDO_APP": "a", "QDO_COORDINATOR": coordinator, "OUT": str(self._out)}
        for each in self.folders:
            each.mkdir()
            (each / "jobs.py").write_text(JOB)

    def file(self, machine: int) -> str:
        return f"sqlite:{self.folders[machine]}/qdo-data/messages.db"

    def start(self, machine: int, *options: str) -> Proc:
        """Start a worker; it runs in its folder, with the default broker there."""
        argv = (*WORKER, "--job", "jobs:write", *options)
        env = clean_environment(self._env)
        return self._stack.enter_context(Proc.python(*argv, env=env, cwd=self.folders[machine]))

    def send(self, machine: int, body: str) -> None:
        with App("a", broker=self.file(machine)) as app:
            app.send("q", body)

    def qdo(self, *argv: str) -> Ended:
        return command(*QDO, *argv, cwd=self.folders[0], env=self._env)

    def done(self) -> list[str]:
        return self._out.read_text().split() if self._out.exists() else []


@pytest.fixture
def machines(tmp_path: Path, coordinator_url: str) -> Iterator[TwoMachines]:
    with ExitStack() as stack:
        yield TwoMachines(tmp_path, coordinator_url, stack)


def test_a_worker_with_another_broker_file_does_not_start(machines: TwoMachines) -> None:
    """The error names both files; the first worker, and more on its file, run on."""
    first = machines.start(0)
    first.wait_for_line("worker-0000000000: registered")
    other = machines.start(1)
    assert other.wait() == 2, other.output
    assert "registered;" not in other.output
    [line] = [line for line in other.output.splitlines() if line.startswith("qdo-worker: ")]
    for part in (
        machines.file(0),
        machines.file(1),
        socket.gethostname(),
        "qdo admin broker file --reset",
    ):
        assert part in line
    more = machines.start(1, "--broker", machines.file(0))
    more.wait_for_line(r"worker-\d+: registered")
    machines.send(0, "sent")
    wait_until(lambda: machines.done() == ["sent"], "the message in the first file")


def test_two_first_workers_agree_on_one_broker_file(machines: TwoMachines) -> None:
    """Started at the same moment, one of them runs, and the other exits."""
    both = [machines.start(0), machines.start(1)]
    ended: list[int] = []

    def one_exited() -> bool:
        ended[:] = [n for n, each in enumerate(both) if "qdo-worker: " in each.output]
        return bool(ended)

    wait_until(one_exited, "one of them is refused")
    assert both[ended[0]].wait() == 2
    winner = 1 - ended[0]
    both[winner].wait_for_line("registered;")
    machines.send(winner, "sent")
    wait_until(lambda: machines.done() == ["sent"], "the message in its file")


def test_a_broker_file_is_changed_on_purpose(machines: TwoMachines) -> None:
    """Once all workers have stopped; the positions of the queues stay."""
    machines.send(0, "before")
    first = machines.start(0)
    wait_until(lambda: machines.done() == ["before"], "the message in the first file")
    refused = machines.qdo("admin", "broker", "file", "--reset", "--yes")
    assert (refused.code, refused.out) == (5, "")
    assert "worker-0000000000" in refused.err
    first.send(signal.SIGTERM)
    assert first.wait() == 0, first.output
    [item] = machines.qdo("admin", "broker", "file", "-o", "json").items()
    assert (item["address"], item["host"]) == (machines.file(0), socket.gethostname())
    assert machines.qdo("admin", "broker", "file", "--reset", "--yes").code == 0
    assert json.loads(machines.qdo("admin", "broker", "file", "-o", "json").out)["items"] == []
    [entry] = machines.qdo("audit", "-o", "json").items()
    assert entry["command"] == "admin broker file --reset"
    assert entry["from"]["address"] == machines.file(0)
    machines.send(1, "after")
    machines.start(1).wait_for_line(r"worker-\d+: registered")
    wait_until(lambda: machines.done() == ["before", "after"], "the message in the new file")
    old = machines.start(0)
    assert old.wait() == 2, old.output


def test_a_deleted_broker_file_is_not_replaced_silently(machines: TwoMachines) -> None:
    """A new file has a new id, also in the same place."""
    burst = machines.start(0, "--burst")
    assert burst.wait() == 0, burst.output
    for each in (machines.folders[0] / "qdo-data").glob("messages.db*"):
        if each.is_file():
            each.unlink()
    again = machines.start(0, "--burst")
    assert again.wait() == 2, again.output
    assert machines.qdo("admin", "broker", "file", "--reset", "--yes").code == 0
    assert machines.start(0, "--burst").wait() == 0
