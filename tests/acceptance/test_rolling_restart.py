"""A rolling restart of a busy fleet, as in a deployment, repeats nothing."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qdo.app import App
from tests.support.processes import Proc, children, wait_until, whole_lines

WORKER = "import sys; from qdo.cli.worker import main; sys.argv[0] = 'qdo-worker'; main()"
JOBS = """
import os, time
import qdo

app = qdo.App("a")
out = os.open("out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.job()
def write(message, context):
    time.sleep(0.003)
    os.write(out, f"{message.queue} {message.body} {os.getpid()}\\n".encode())

@app.job("slow-*")
def slow(message, context):
    os.write(out, f"{message.queue} begun {os.getpid()}\\n".encode())
    while not os.path.exists("go-on"):
        time.sleep(0.01)
    os.write(out, f"{message.queue} done {os.getpid()}\\n".encode())
"""
QUEUES = [f"q{number:02}" for number in range(18)]
MEMBERS = 3
PROCESSES = 2
PERIOD_SECONDS = 0.01


class RepeatingSender(threading.Thread):
    """Sends a message to every queue repeatedly, until `finish`.

    :ivar sent: number of messages sent to each queue.
    """

    def __init__(self, app: App) -> None:
        super().__init__(daemon=True)
        self.sent = 0
        self.error: BaseException | None = None
        self._app = app
        self._over = threading.Event()

    def run(self) -> None:
        try:
            while not self._over.wait(PERIOD_SECONDS):
                self._app.send_many([(queue, self.sent) for queue in QUEUES])
                self.sent += 1
        except BaseException as error:
            self.error = error
            raise

    def finish(self) -> None:
        self._over.set()
        self.join(30.0)
        assert self.error is None


class RollingFleet:
    """Members of a fleet, each a parent with worker processes, with files in a folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        (folder / "jobs.py").write_text(JOBS)
        (folder / "qdo-data").mkdir()
        self.app = stack.enter_context(App("a", broker=f"sqlite:{folder}/qdo-data/messages.db"))

    def start(self, *options: str, processes: int = PROCESSES) -> Proc:
        argv = ("jobs:app", "--processes", str(processes), *options)
        return self._stack.enter_context(Proc.python("-c", WORKER, *argv, cwd=self.folder))

    def lines(self) -> list[list[str]]:
        path = self.folder / "out"
        return [line.split() for line in whole_lines(path)]

    def processed(self) -> dict[str, list[int]]:
        """Return the bodies by queue, in the order of processing."""
        found: dict[str, list[int]] = {queue: [] for queue in QUEUES}
        for queue, body, _ in self.lines():
            found[queue].append(int(body))
        return found

    def workers(self) -> set[int]:
        """Return the processes that have processed anything."""
        return {int(pid) for *_, pid in self.lines()}

    def wait_busy(self, member: Proc) -> list[int]:
        """Wait until every worker process of a member has processed something; return them."""

        def busy() -> bool:
            pids = children(member.pid)
            return len(pids) == PROCESSES and set(pids) <= self.workers()

        wait_until(busy, "every worker of a member is busy", 60.0)
        return children(member.pid)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RollingFleet]:
    with ExitStack() as stack:
        yield RollingFleet(tmp_path, stack)


def test_a_rolling_restart_repeats_nothing_and_loses_nothing(fleet: RollingFleet) -> None:
    """Every message is processed once and in order, though all workers are replaced.

    The last member is replaced before its stop signal, the others after they have left.
    """
    members = [fleet.start() for _ in range(MEMBERS)]
    sender = RepeatingSender(fleet.app)
    sender.start()
    pids: set[int] = set()
    for index, member in enumerate(list(members)):
        pids.update(fleet.wait_busy(member))
        if index == MEMBERS - 1:
            members.append(fleet.start())
        member.send(signal.SIGTERM)
        assert member.wait(60.0) == 0, member.output
        assert "aborting" not in member.output
        if index < MEMBERS - 1:
            members.append(fleet.start())
    for member in members[MEMBERS:]:
        pids.update(fleet.wait_busy(member))
    sender.finish()
    expected = {queue: list(range(sender.sent)) for queue in QUEUES}
    enough = sender.sent * len(QUEUES)
    wait_until(lambda: len(fleet.lines()) >= enough, "everything sent is processed", 60.0)
    for member in members[MEMBERS:]:
        member.send(signal.SIGTERM)
    assert [member.wait(60.0) for member in members[MEMBERS:]] == [0] * MEMBERS
    assert fleet.processed() == expected
    assert len(pids) == 2 * MEMBERS * PROCESSES
    assert pids <= fleet.workers()


@pytest.mark.parametrize("how", ["budget", "second signal"])
def test_drain_logs_aborted_messages_for_their_next_owner(fleet: RollingFleet, how: str) -> None:
    """After `drain_seconds`, or at the second signal; the other queues are released cleanly."""
    seconds = "0.5" if how == "budget" else "3600"
    identifiers = [fleet.app.send(f"slow-{number}", 1) for number in range(2)]
    first = fleet.start("--drain-seconds", seconds, processes=1)
    begun = [["slow-0", "begun"], ["slow-1", "begun"]]
    wait_until(lambda: sorted(line[:2] for line in fleet.lines()) == begun, "both jobs run")
    second = fleet.start(processes=1)
    second.wait_for_line(r"member\[\d+\] worker-\d+: registered")
    first.send(signal.SIGTERM)
    if how == "second signal":
        first.wait_for_line("step 2: ")
        first.send(signal.SIGTERM)
    assert first.wait() == 1, first.output
    reason = re.escape("drain_seconds (0.5 s)" if how == "budget" else "second stop signal")
    for number, identifier in enumerate(identifiers):
        first.wait_for_line(rf"{reason}.*: aborting message {identifier} of queue slow-{number}, ")
    (fleet.folder / "go-on").touch()
    done = [["slow-0", "done"], ["slow-1", "done"]]
    wait_until(
        lambda: sorted(line[:2] for line in fleet.lines() if line[1] == "done") == done,
        "the next owner runs both",
    )
    second.send(signal.SIGTERM)
    assert second.wait() == 0, second.output
