"""Format levels, with real workers: which versions start, and which features wait for them."""

from __future__ import annotations

import json

from qdo._version import FORMAT_LEVEL
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp
from qdo.fleet.components import AppLevel, LevelChore
from tests.support.app_runs import AppRuns
from tests.support.cli import Ended
from tests.support.processes import wait_until


def set_limit(runs: AppRuns) -> Ended:
    return runs.qdo("limits", "set", "crm", "--max", "3")


def levels(client: Client, runs: AppRuns) -> AppLevel:
    return AppLevel.parse(client.get(runs.layout.root)[0])


def test_an_older_version_does_not_start(runs: AppRuns, outsider: Client) -> None:
    runs.app.send("q", 1)
    outsider.ensure_path(runs.layout.root)
    for value in ({"level": FORMAT_LEVEL + 1}, {"level": 1, "next_level": FORMAT_LEVEL + 1}):
        outsider.set(runs.layout.root, json.dumps(value).encode())
        worker = runs.work()
        assert worker.wait() == 5
        assert "format level" in worker.output
    outsider.set(runs.layout.root, b"null")  # of another program
    runs.work()
    wait_until(lambda: runs.runs("q"), "the run")


def test_the_leader_raises_the_level_in_two_steps(runs: AppRuns, outsider: Client) -> None:
    runs.app.send("q", 1)
    worker = runs.work()
    wait_until(lambda: runs.runs("q"), "the run")
    fence = CheckOp(runs.layout.rebalancer)
    chore = LevelChore()
    old = f"{runs.layout.components}/worker/old-0000000009"
    outsider.create(old, b'{"worker": "worker-0000000009"}', ephemeral=True)
    chore(outsider, runs.layout, fence)
    assert levels(outsider, runs).next_level == 0
    refused = set_limit(runs)
    assert refused.code == 5
    assert "old-0000000009" in refused.err
    outsider.delete(old)
    chore(outsider, runs.layout, fence)
    announced = levels(outsider, runs)
    assert (announced.format_level, announced.next_level) == (0, FORMAT_LEVEL)
    chore(outsider, runs.layout, fence)
    raised = levels(outsider, runs)
    assert (raised.format_level, raised.next_level) == (FORMAT_LEVEL, 0)
    assert set_limit(runs).code == 0
    deposed = CheckOp(runs.layout.rebalancer, 10**6)
    outsider.set(runs.layout.root, b"")
    chore(outsider, runs.layout, deposed)
    assert outsider.get(runs.layout.root)[0] == b""
    worker.send(15)
    assert worker.wait() == 0
