"""Commit histories counted from a stream that is split midway, by a fleet of which one dies.

The ledger adds up in one transaction with the proof that a message was counted, so that totals are
exact and its journal shows the order in which commits were counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ujson

from qdo.brokers.base import Outgoing
from tests.acceptance.test_churn import expected, stream
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.cli import WORKER, clean_environment
from tests.support.kinesis import kinesis_url, opened
from tests.support.processes import Proc, descendants, wait_until

WAIT_SECONDS = 100.0


class LedgerEntries:
    """The entries of the workers' ledger."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def counted(self) -> int:
        """Return how many commits were counted."""
        if not self._path.exists():
            return 0
        with contextlib.suppress(sqlite3.OperationalError):  # it is being made
            return int(self._ask("SELECT coalesce(sum(commits), 0) FROM totals")[0][0])
        return 0

    def commits(self) -> list[str]:
        """Return the ids of the commits in the order in which they were counted."""
        return [str(row[0]) for row in self._ask("SELECT commit_id FROM counted ORDER BY place")]

    def shards(self) -> int:
        return len(self._ask("SELECT DISTINCT queue FROM counted"))

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self._path)) as database:
            return database.execute(statement).fetchall()


@pytest.fixture
def records() -> list[dict[str, Any]]:
    return stream()


@pytest.fixture
def fleet(
    kinesis: KinesisStub, aws_stream: str, zookeeper_url: str, tmp_path: Path
) -> Iterator[list[Proc]]:
    """Three workers on a stream of four shards."""
    kinesis.make(aws_stream, 4)
    environment = {
        **clean_environment(),
        "QDO_BROKER": kinesis_url(kinesis.url, aws_stream),
        "CHURN_DB": str(tmp_path / "churn.db"),
        "QDO_COORDINATOR": zookeeper_url,
        "QDO_SESSION_TIMEOUT_SECONDS": "4",
    }
    with contextlib.ExitStack() as workers:
        yield [
            workers.enter_context(
                Proc(
                    [sys.executable, *WORKER, "qdo.programs.churn:app", "--log-level", "info"],
                    cwd=tmp_path,
                    env=environment,
                )
            )
            for _ in range(3)
        ]


def test_totals_and_order_survive_a_split_and_a_killed_worker(
    kinesis: KinesisStub,
    aws_stream: str,
    tmp_path: Path,
    records: list[dict[str, Any]],
    fleet: list[Proc],
) -> None:
    """Four shards become six and one of three workers dies: each commit counts once, in order."""
    journal = LedgerEntries(tmp_path / "churn.db")
    broker = opened(kinesis.url, aws_stream)
    half = len(records) // 2

    def send(part: list[dict[str, Any]]) -> None:
        broker.send_many(
            [Outgoing(aws_stream, ujson.dumps(each).encode(), each["repo"]) for each in part]
        )

    send(records[:half])
    wait_until(lambda: journal.counted() > half // 3, "a third is counted", WAIT_SECONDS)
    for shard in ("shardId-000000000001", "shardId-000000000003"):
        kinesis.split(aws_stream, shard)
    send(records[half:])
    victim = fleet[1]
    for pid in (victim.pid, *descendants(victim.pid)):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: journal.counted() >= len(records), "all are counted", WAIT_SECONDS)
    check(journal, records)
    assert journal.shards() == 8
    for worker in (fleet[0], fleet[2]):
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
    broker.close()


def check(journal: LedgerEntries, records: list[dict[str, Any]]) -> None:
    """Each commit was counted once, after its parents; totals are those of a plain loop."""
    by_id = {each["commit"]: each for each in records}
    counted = journal.commits()
    assert Counter(counted) == Counter(list(by_id))
    place = {commit: index for index, commit in enumerate(counted)}
    early = [
        commit
        for commit in counted
        if any(place.get(parent, -1) > place[commit] for parent in by_id[commit]["parents"])
    ]
    assert early == []
    sums: dict[str, list[int]] = {}
    for commit in counted:
        each = by_id[commit]
        row = sums.setdefault(each["repo"], [0, 0, 0])
        row[0] += 1
        row[1] += each["insertions"]
        row[2] += each["deletions"]
    assert [(name, *row) for name, row in sorted(sums.items())] == expected(records)
