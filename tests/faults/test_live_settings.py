"""Live settings while operators and workers are killed, seen from the server's transaction log."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.live_settings import read_answers, read_settings
from tests.soak.log_rules import FlipRules
from tests.support.cli import QDO, WORKER
from tests.support.processes import Proc, wait_until
from tests.support.zookeeper import Ensemble
from tests.support.zookeeper_txn_log import read_log

JOBS = """
import qdo

app = qdo.App("live")

@app.job()
def job(message, context):
    pass
"""
ROUNDS = 12
LAYOUT = Layout.of("live")


def test_versions_come_into_force_only_where_accepted(
    zookeeper_server: Ensemble, tmp_path: Path
) -> None:
    """Operators and workers die at any step; some workers refuse some versions."""
    url = zookeeper_server.url("/live-log")
    (tmp_path / "jobs.py").write_text(JOBS)
    (tmp_path / "strict.toml").write_text("backoff_max_seconds = 50\n")
    places = {"QDO_APP": "live", "QDO_COORDINATOR": url, "QDO_SESSION_TIMEOUT_SECONDS": "3"}
    chance = random.Random(5)
    with contextlib.ExitStack() as stack:

        def worker(*options: str) -> Proc:
            argv = (*WORKER, "jobs:app", *options)
            return stack.enter_context(Proc.python(*argv, env=places, cwd=tmp_path))

        def operator(*arguments: str) -> Proc:
            argv = (*QDO, "settings", "set", "--timeout", "5s", *arguments)
            return stack.enter_context(Proc.python(*argv, env=places, cwd=tmp_path))

        def changed(before: int) -> bool:
            return client.get(LAYOUT.fleet.settings)[1].mzxid > before

        client = connect(url, handler="threading")
        client.open(10.0)
        stack.callback(client.close)
        stack.callback(client.stop)
        workers = [worker(), worker(), worker("--config", "strict.toml")]
        wait_until(lambda: len(read_answers(client, LAYOUT)) == 3, "three workers")
        for number in range(1, ROUNDS + 1):
            before = client.get(LAYOUT.fleet.settings)[1].mzxid
            # The strict worker refuses every third value.
            seconds = 60 if number % 3 == 0 else number
            operators = [
                operator("backoff_seconds", str(seconds)),
                operator("attempts", str(number)),
            ]
            if number % 4 == 0:
                wait_until(lambda before=before: changed(before), "a proposal")  # type: ignore[misc]
                operators[chance.randrange(2)].send(signal.SIGKILL)
            if number % 5 == 0:
                victim = chance.randrange(2)
                os.kill(workers[victim].pid, signal.SIGKILL)
                workers[victim] = worker()
            for each in operators:
                each.wait()
        last = read_settings(client, LAYOUT)
        wait_until(
            lambda: all(
                each.report is not None and each.report.uses == last.number
                for each in read_answers(client, LAYOUT)
            ),
            "all use the version in force",
        )
    rules = FlipRules(f"/live-log{LAYOUT.root}")
    rules.replay(read_log(zookeeper_server.servers[0].folder))
    assert rules.violations == []
    assert rules.flips == last.number
    assert rules.flips >= ROUNDS / 2
