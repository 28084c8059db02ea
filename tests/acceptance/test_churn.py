"""Commit histories counted by a fleet: totals and order hold whatever happens to workers.

The stream is made here: repositories whose commits have up to two parents among those before
them, interleaved as if they came from many places at once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.programs.churn import Totals, TotalsFile
from tests.support.cli import QDO, WORKER, clean_environment, command
from tests.support.processes import Proc, children, paused, wait_until
from tests.support.slow_churn import GATE_VARIABLE
from tests.support.zookeeper import Ensemble

REPOSITORIES = 24
COMMITS = 250
GATED = 50
"""The last commits of each repository, which the slow job holds back until the gate opens."""
SESSION_SECONDS = 2.5


def history(repository: str, dice: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the commits of a repository, parents before children."""
    made: list[str] = []
    for number in range(COMMITS):
        commit = f"{dice.getrandbits(160):040x}"
        count = min(dice.choice([1, 1, 1, 1, 2]), len(made))
        yield {
            "repo": repository,
            "commit": commit,
            "parents": dice.sample(made[-5:], min(count, len(made[-5:]))),
            "time": 1_300_000_000 + number,
            "files": 1,
            "insertions": dice.randrange(1000),
            "deletions": dice.randrange(500),
            "gated": number >= COMMITS - GATED,
        }
        made.append(commit)


def stream() -> list[dict[str, Any]]:
    """Return the commits of all repositories, interleaved, each repository in order."""
    dice = random.Random(7)
    histories = [history(f"repository-{number:02}", dice) for number in range(REPOSITORIES)]
    records = []
    while histories:
        chosen = dice.choice(histories)
        record = next(chosen, None)
        if record is None:
            histories.remove(chosen)
        else:
            records.append(record)
    return records


def expected(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the totals as a plain loop computes them."""
    sums: dict[str, list[int]] = {}
    for record in records:
        row = sums.setdefault(record["repo"], [0, 0, 0])
        row[0] += 1
        row[1] += record["insertions"]
        row[2] += record["deletions"]
    return [(name, *row) for name, row in sorted(sums.items())]


class ChurnFleet:
    """A parent with its workers, their files in a folder, and the ledger they write."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.folder = folder
        self._gate = folder / "gate"
        self.environment = {
            GATE_VARIABLE: str(self._gate),
            "QDO_APP": "churn",
            "CHURN_DB": str(folder / "churn.db"),
            "QDO_COORDINATOR": coordinator,
            "QDO_SESSION_TIMEOUT_SECONDS": str(SESSION_SECONDS),
        }
        self.records = stream()

    def send(self) -> None:
        """Put the whole stream into the broker."""
        lines = "".join(json.dumps(record) + "\n" for record in self.records).encode()
        arguments = ("send", "--file", "-", "--queue-field", "repo")
        ended = command(*QDO, *arguments, cwd=self.folder, stdin=lines, env=self.environment)
        assert ended.err.splitlines()[0] == f"sent {len(self.records)} messages"

    def work(self, job: str, processes: int) -> Proc:
        """Start workers that end once every queue is empty."""
        return Proc(
            [sys.executable, *WORKER, "--job", job, "--processes", str(processes), "--burst"],
            cwd=self.folder,
            env={**clean_environment(), **self.environment},
        )

    def open_gate(self) -> None:
        """Let the slow job finish."""
        self._gate.touch()

    def counted(self) -> int:
        """Return how many commits the ledger holds."""
        return sum(each.commits for each in self.totals())

    def totals(self) -> list[Totals]:
        """Return the totals of the ledger."""
        ledger = TotalsFile(self.environment["CHURN_DB"])
        try:
            return ledger.totals()
        finally:
            ledger.close()

    def wait_counted(self, share: float) -> None:
        """Wait until a share of the stream is counted."""
        wanted = share * len(self.records)
        wait_until(lambda: self.counted() >= wanted, f"{wanted:g} commits are counted", 60)

    def check(self) -> None:
        """Every commit is counted once and after its parents; nothing is owned or waits."""
        totals = self.totals()
        counted = [(each.queue, each.commits, each.insertions, each.deletions) for each in totals]
        assert counted == expected(self.records)
        assert [each for each in totals if each.before_parent] == []
        ended = command(*QDO, "queues", "-o", "jsonl", cwd=self.folder, env=self.environment)
        items = [json.loads(line) for line in ended.out.splitlines()]
        assert len(items) == REPOSITORIES
        unfinished = [each for each in items if each["backlog"] or each["dead_letters"]]
        assert unfinished == []
        assert [each for each in items if each["owner"] and not each["owner_gone"]] == []


@pytest.fixture(params=["embedded_url", "zookeeper_url", "database_url"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> ChurnFleet:
    """A fleet on either coordinator, with the stream sent."""
    fleet = ChurnFleet(tmp_path, request.getfixturevalue(request.param))
    fleet.send()
    return fleet


def test_one_worker(fleet: ChurnFleet) -> None:
    """The totals of one worker process are those of a plain loop."""
    with fleet.work("qdo.programs.churn:job", 1) as parent:
        assert parent.wait(60) == 0, parent.output
    fleet.check()


def test_three_workers_one_killed_one_frozen(fleet: ChurnFleet) -> None:
    """One of three is killed midway; another one is stopped for three session timeouts, loses
    its queues meanwhile, and is continued."""
    with fleet.work("tests.support.slow_churn:job", 3) as parent:
        fleet.wait_counted(0.2)
        first, second, *_ = children(parent.pid)
        os.kill(first, signal.SIGKILL)
        fleet.wait_counted(0.4)
        with paused(second, fleet.environment["QDO_COORDINATOR"]):
            threading.Event().wait(3 * SESSION_SECONDS)
        fleet.open_gate()
        assert parent.wait(60) == 0, parent.output
    fleet.check()


def test_leader_of_the_ensemble_killed(
    ensemble_url: str, zookeeper_ensemble: Ensemble, tmp_path: Path
) -> None:
    """Three ZooKeeper servers lose their leader midway; workers wait and resume."""
    fleet = ChurnFleet(tmp_path, ensemble_url)
    fleet.send()
    with fleet.work("tests.support.slow_churn:job", 3) as parent:
        fleet.wait_counted(0.3)
        leader = zookeeper_ensemble.leader()
        leader.kill()
        try:
            fleet.open_gate()
            assert parent.wait(90) == 0, parent.output
        finally:
            leader.start()
            leader.wait_ready()
    fleet.check()
