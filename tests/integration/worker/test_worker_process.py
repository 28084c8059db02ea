"""How worker processes begin and end: what their parents, signals and lost sessions change."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from qdo.ops.worker_status import worker_statuses
from tests.support.app_runs import OperatorDesk
from tests.support.postgresql.proxy import cutting
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import alive, children, paused, wait_until

BLOCKING = """
from tests.apps.notes import app, note

@app.job()
def job(message, context):
    note(message)
    while True:
        pass
"""


def assigned(desk: OperatorDesk) -> list[int]:
    """Return how many queues each registered worker has or is to get."""
    return [each.assigned for each in worker_statuses(desk.client, desk.layout)]


def test_a_third_sigterm_exits_even_where_a_job_blocks(local: OperatorDesk) -> None:
    """The event loop never turns; its watchdog ends the process."""
    local.send(1)
    parent = local.start(BLOCKING)
    parent.wait_for_line("has been blocked for")
    (worker,) = children(parent.pid)

    def ended() -> bool:
        # More than three: Python counts two as one that come before its handler has run.
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGTERM)
        return not alive(worker)

    wait_until(ended, "the end of the process")
    parent.wait_for_line("third stop signal: exiting immediately")


def test_the_parents_death_drains(local: OperatorDesk) -> None:
    """The message in flight ends, no other begins, and the next worker repeats nothing."""
    local.send(1, 2)
    held = local.hold(1)
    parent = local.work()
    local.wait_for(1)
    (worker,) = children(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait_for_line("the parent process died")
    held.unlink()
    wait_until(lambda: not alive(worker), "the worker has drained")
    assert local.runs("q") == [("1", 1)]
    local.drain()
    assert local.runs("q") == [("1", 1), ("2", 1)]


def test_a_worker_starts_before_the_server_of_its_broker(
    tmp_path: Path, embedded_url: str, database_url: str, postgresql: PostgresqlDatabase
) -> None:
    """It tries for `connect_seconds`, as for a coordinator; it closes its session itself."""
    with (
        contextlib.closing(OperatorDesk("desk", tmp_path, embedded_url, database_url)) as desk,
        cutting(postgresql.server.port) as proxy,
    ):
        desk.send(1)
        proxy.refusing = True
        url = database_url.replace(f":{postgresql.server.port}", f":{proxy.port}")
        assert desk.work("--broker", url, "--connect-seconds", "0.5").wait() == 3
        worker = desk.work("--broker", url, "--connect-seconds", "60")
        worker.wait_for_line("retrying")
        proxy.refusing = False
        desk.wait_for(1)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert "closed its session" not in worker.output


def test_a_drain_after_a_lost_session_is_not_a_clean_stop(local: OperatorDesk) -> None:
    """A worker that was frozen beyond its session, and is then told to stop, exits with 1."""
    for number in range(4):
        local.send(number, queue=f"q{number}")
    held = [local.hold(number) for number in range(4)]
    frozen = local.work("--session-timeout-seconds", "2")
    wait_until(lambda: assigned(local) == [4], "the first worker has all queues")
    other = local.work("--session-timeout-seconds", "2")
    wait_until(lambda: len(assigned(local)) == 2, "the second worker")
    (process,) = children(frozen.pid)
    with paused(process, local.coordinator, local.broker_url):
        wait_until(lambda: assigned(local) == [4], "the other worker has all queues")
        frozen.send(signal.SIGTERM)
        frozen.wait_for_line("signal: draining")
    for each in held:
        each.unlink()
    assert frozen.wait() == 1
    assert "session was lost" in frozen.output
    totals = re.search(r"(\d+) claimed, (\d+) released, (\d+) lost", frozen.output)
    assert totals is not None
    claimed, released, lost = map(int, totals.groups())
    assert claimed == released + lost
    assert lost > 0
    other.send(signal.SIGTERM)
    assert other.wait() == 0
