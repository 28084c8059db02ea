"""A rolling restart of a busy fleet, as in a deployment, repeats nothing."""

from __future__ import annotations

import signal
import threading

from qdo.app import App
from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, children, wait_until

JOBS = """
import time
from tests.apps.notes import app, note

@app.job()
def write(message, context):
    time.sleep(0.003)
    note(message)
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
        self._app = app
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            self._app.send_many([(queue, self.sent) for queue in QUEUES])
            self.sent += 1

    def finish(self) -> None:
        assert self.is_alive(), "it has failed"
        self._over.set()
        self.join(30.0)


def wait_busy(runs: AppRuns, member: Proc) -> list[int]:
    """Wait until every worker process of a member has processed something; return them."""

    def busy() -> bool:
        pids = children(member.pid)
        return len(pids) == PROCESSES and set(pids) <= set(runs.pids())

    wait_until(busy, "every worker of a member is busy", 60.0)
    return children(member.pid)


def test_a_rolling_restart_repeats_nothing_and_loses_nothing(local_runs: AppRuns) -> None:
    """Every message is processed once and in order, though all workers are replaced.

    The last member is replaced before its stop signal, the others after they have left.
    """

    def start() -> Proc:
        return local_runs.start(JOBS, "--processes", str(PROCESSES))

    members = [start() for _ in range(MEMBERS)]
    sender = RepeatingSender(local_runs.app)
    sender.start()
    pids: set[int] = set()
    for index, member in enumerate(list(members)):
        pids.update(wait_busy(local_runs, member))
        if index == MEMBERS - 1:
            members.append(start())
        member.send(signal.SIGTERM)
        assert member.wait(60.0) == 0, member.output
        assert "aborting" not in member.output
        if index < MEMBERS - 1:
            members.append(start())
    for member in members[MEMBERS:]:
        pids.update(wait_busy(local_runs, member))
    sender.finish()
    enough = sender.sent * len(QUEUES)
    wait_until(lambda: len(local_runs.pids()) >= enough, "everything sent is processed", 60.0)
    for member in members[MEMBERS:]:
        member.send(signal.SIGTERM)
    assert [member.wait(60.0) for member in members[MEMBERS:]] == [0] * MEMBERS
    expected = [(str(number), 1) for number in range(sender.sent)]
    assert [local_runs.runs(queue) for queue in QUEUES] == [expected] * len(QUEUES)
    assert len(pids) == 2 * MEMBERS * PROCESSES
    assert pids <= set(local_runs.pids())
