"""The owners of queues in the history: real processes that drain, are killed and hand over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from qdo.errors import HistoryUnreadableError
from qdo.history import recorder as owners_module
from qdo.history.address import open_engine
from qdo.history.recorder import OwnerRow, Recorder
from qdo.history.reports import RecordedOwner, claims, owners, queue_reports
from qdo.history.tables import METADATA, MINUTES, OWNERS, RUNS
from qdo.history.writer import HistoryWriter
from tests.integration.history.test_writing import HOSTILE, Writers, attempts, writers
from tests.support.app_runs import AppRuns, jobs
from tests.support.processes import Proc, children, wait_until

__all__ = ["writers"]
QUEUES = [f"q{number}" for number in range(8)]
DAY = 86_400.0


class ShopWorkers(AppRuns):
    """Workers of one app, and what the history has about their queues."""

    url = ""

    def fill(self, url: str) -> ShopWorkers:
        self.url = url
        self.app.send_many([(each, 1) for each in QUEUES])
        return self

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "QDO_APP": "jobs:app", "QDO_HISTORY": self.url}

    def run(self, *words: str) -> str:
        ended = self.qdo(*words)
        assert ended.code == 0, ended.err
        return ended.out

    def worker(self) -> Proc:
        return self.start(jobs(), QDO_HISTORY=self.url)

    def of(self, queue: str) -> list[RecordedOwner]:
        try:
            return owners(self.url, "desk", queue, 0.0, limit=100)
        except HistoryUnreadableError:  # no worker has created the file yet
            return []

    def before(self, queue: str) -> RecordedOwner:
        return self.of(queue)[1]

    def newest(self) -> list[RecordedOwner]:
        return [found[0] for each in QUEUES if (found := self.of(each))]

    def owned_by(self, *processes: int) -> bool:
        """Whether the newest rows are those of these processes, and none has ended."""
        rows = self.newest()
        pids = {each.pid for each in rows if each.ended is None}
        return len(rows) == len(QUEUES) and pids == set(processes)


@pytest.fixture
def fleet(tmp_path: Path, embedded_url: str) -> Iterator[ShopWorkers]:
    """Its history is in a file; those of one writer below are in both databases."""
    with contextlib.closing(ShopWorkers("desk", tmp_path, embedded_url)) as fleet:
        yield fleet.fill(f"sqlite:{tmp_path / 'history.db'}")


def test_a_drain_is_recorded(fleet: ShopWorkers) -> None:
    """Each queue has one row, with the process and the times."""
    began = time.time()
    with fleet.worker() as worker:
        wait_until(lambda: len(fleet.newest()) == len(QUEUES), "all claims are recorded")
        [process] = children(worker.pid)
        assert fleet.owned_by(process)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    for each in QUEUES:
        [row] = fleet.of(each)
        assert (row.pid, row.why, row.ended is not None) == (process, "drained", True)
        assert began - 1 < row.claimed <= (row.ended or 0.0) < time.time() + 1
        assert row.owner.startswith("worker-")
    shown = fleet.run("history", "owners", "q0", "-o", "json")
    [item] = json.loads(shown)["items"]
    assert (item["owner"], item["why"]) == (fleet.of("q0")[0].owner, "drained")
    lines = [json.loads(line) for line in fleet.run("events", "q0", "-o", "jsonl").splitlines()]
    assert [(each["before"], each["after"], each["reason"]) for each in lines] == [
        ("", item["owner"], ""),
        (item["owner"], "", "drained"),
    ]


def test_a_killed_process_is_known_by_the_next_claim(fleet: ShopWorkers) -> None:
    """Until then its claims seem to last."""
    with fleet.worker() as worker:
        wait_until(lambda: len(fleet.newest()) == len(QUEUES), "all claims are recorded")
        [process] = children(worker.pid)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: fleet.newest()[0].pid != process, "another process claims")
        [another] = children(worker.pid)
        wait_until(lambda: fleet.owned_by(another), "it claims all of them")
        for each in QUEUES:
            now, before = fleet.of(each)
            assert (before.pid, before.ended, before.why) == (process, None, "unknown")
            assert (now.pid, now.why) == (another, None)
            assert now.fence > before.fence
        out = fleet.run("queues", "q0")
        assert out.index(f"pid {another}") < out.index(f"pid {process} (unknown)")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_a_rebalance_is_recorded(fleet: ShopWorkers) -> None:
    """A second worker takes half of the queues."""
    with fleet.worker() as first:
        wait_until(lambda: len(fleet.newest()) == len(QUEUES), "all claims are recorded")
        with fleet.worker() as second:
            wait_until(lambda: len(children(second.pid)) == 1, "the second one has a process")
            pids = [children(each.pid)[0] for each in (first, second)]
            wait_until(lambda: fleet.owned_by(*pids), "both own some")
            moved = [each for each in QUEUES if fleet.of(each)[0].pid == pids[1]]
            assert len(moved) == len(QUEUES) // 2
            ends = {(pids[0], "rebalanced")}
            wait_until(
                lambda: {(row.pid, row.why) for row in map(fleet.before, moved)} == ends, "the ends"
            )
            assert None not in {row.ended for row in map(fleet.before, moved)}
            for each in (second, first):
                each.send(signal.SIGTERM)
                assert each.wait() == 0


def test_a_lost_session_is_recorded(fleet: ShopWorkers) -> None:
    """The process lives, and registers as another worker."""
    with fleet.worker() as worker:
        wait_until(lambda: len(fleet.newest()) == len(QUEUES), "all claims are recorded")
        first = fleet.of("q0")[0]
        fleet.client.delete(fleet.layout.worker(first.owner))
        wait_until(lambda: fleet.of("q0")[0].owner != first.owner, "the queue has a new owner")
        wait_until(lambda: fleet.owned_by(first.pid), "the same process owns all again")
        assert fleet.of("q0")[1].why == "session"
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_workers_do_not_wait_for_the_database(fleet: ShopWorkers) -> None:
    """No server answers at this address."""
    fleet.url = "postgresql://ann@127.0.0.1:1/db"
    with fleet.worker() as worker:

        def backlogs() -> set[Any]:
            items = json.loads(fleet.run("queues", "-o", "json"))["items"]
            return {each["backlog"] for each in items}

        wait_until(lambda: backlogs() == {0}, "all messages are done")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    out = json.loads(fleet.run("queues", "q0", "-o", "json"))
    assert out["items"][0]["owners"] is None


# --- one writer ---------------------------------------------------------------------------


def claim(recorder: Recorder, queue: str, fence: int, why: str = "") -> None:
    recorder.owners.claimed(queue, fence, f"worker-{fence:010}")
    if why:
        recorder.owners.ended(queue, fence, why)


def rows(url: str) -> int:
    with open_engine(url, writes=False).connect() as connection:
        return int(connection.execute(select(func.count()).select_from(OWNERS)).scalar_one())


def test_many_claims_are_written_in_parts(url: str, writers: Writers) -> None:
    recorder, writer = writers(url)
    for number in range(5000):
        claim(recorder, f"q{number}", number)
    for expected in (2000, 4000, 5000):
        writer.step()
        assert rows(url) == expected


def test_the_last_write_has_all_ends(url: str) -> None:
    """A drain releases more queues at once than one write takes."""
    recorder = Recorder()
    writer = HistoryWriter(url, "test", recorder)
    for number in range(5000):
        claim(recorder, f"q{number}", number, "drained")
    writer.start()
    writer.close(30.0)
    assert rows(url) == 5000
    assert {each.why for each in owners(url, "test", "q4999", 0.0, limit=9)} == {"drained"}


def test_a_late_claim_does_not_replace_its_end(url: str, writers: Writers) -> None:
    recorder, writer = writers(url)
    claim(recorder, "q", 7, "rebalanced")
    late = OwnerRow("q", 7, "worker-0000000007", 1.0)
    writer.step()
    writer._owners = [late]
    writer._write([], [], [], 0.0)
    [row] = owners(url, "test", "q", 0.0, limit=9)
    assert (row.why, row.ended is not None) == ("rebalanced", True)


def test_lost_answers_and_hostile_names_change_nothing(
    url: str, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, writer = writers(url)
    real = writer._write

    def lost(*arguments: Any) -> None:
        real(*arguments)
        raise ConnectionError("the answer is lost")

    for number, each in enumerate(HOSTILE):
        claim(recorder, each, number, "drained")
    monkeypatch.setattr(writer, "_write", lost)
    writer.step()
    monkeypatch.undo()
    assert writer.failing
    writer.step()
    assert (writer.failing, rows(url)) == (False, len(HOSTILE))


def test_since_leaves_out_what_ended_before(url: str, writers: Writers) -> None:
    """An unknown end counts as the next claim."""
    recorder, writer = writers(url)
    now = time.time()
    for fence, age, ended in ((1, 50, 40), (2, 40, None), (3, 20, 10), (4, 5, None)):
        done = None if ended is None else now - ended
        why = None if ended is None else "rebalanced"
        recorder.owners.pending.append(OwnerRow("q", fence, "w", now - age, done, why))
    writer.step()

    def found(since: float) -> list[tuple[int, str | None]]:
        return [(each.fence, each.why) for each in owners(url, "test", "q", since, limit=9)]

    def begun_or_ended(since: float, glob: str = "q*", limit: int = 9) -> list[int]:
        return [each.fence for _, each in claims(url, "test", since, glob, limit=limit)]

    everything = [(4, None), (3, "rebalanced"), (2, "unknown"), (1, "rebalanced")]
    assert found(0.0) == everything
    assert found(now - 30) == everything[:3]
    assert found(now - 15) == everything[:2]
    assert found(now - 1) == everything[:1]
    assert owners(url, "test", "other", 0.0, limit=9) == []
    assert begun_or_ended(0.0) == [4, 3, 2, 1]
    assert begun_or_ended(now - 45) == [4, 3, 2, 1]
    assert begun_or_ended(now - 15) == [4, 3]
    assert begun_or_ended(now - 1) == []
    assert begun_or_ended(0.0, limit=2) == [4, 3]
    assert begun_or_ended(0.0, "p*") == []


def test_old_owners_are_deleted(url: str, writers: Writers) -> None:
    """Not one that lasts, nor one that ended a month after its claim."""
    recorder, writer = writers(url)
    now = time.time()
    kept = {("long", 1), ("old", 3), ("lasting", 1)}
    for queue, fence, age, ended in (
        *(("old", 1, 40, 35), ("old", 2, 34, None), ("old", 3, 33, 2)),
        *(("long", 1, 50, 10), ("lasting", 1, 60, None), ("ancient", 1, 400, None)),
    ):
        done = None if ended is None else now - ended * DAY
        why = None if ended is None else "drained"
        recorder.owners.pending.append(OwnerRow(queue, fence, "w", now - age * DAY, done, why))
    writer.step()
    with open_engine(url, writes=False).connect() as connection:
        found = connection.execute(select(OWNERS.c.queue, OWNERS.c.fence)).all()
    assert {tuple(each) for each in found} == kept


def test_owners_have_limited_room(
    url: str, writers: Writers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owners_module, "MAX_KEPT_OWNERS", 10)
    recorder, writer = writers(url)
    for number in range(25):
        claim(recorder, f"q{number}", number)
    assert (len(recorder.owners.pending), writer.dropped) == (10, 15)
    writer.step()
    assert rows(url) == 10
    assert sum("limit on kept rows" in each.getMessage() for each in caplog.records) == 1


def test_a_failed_write_keeps_the_owners(url: str, writers: Writers) -> None:
    recorder, writer = writers(url)
    claim(recorder, "q", 1, "drained")
    connect = writer._connect

    def away() -> Any:
        raise ConnectionError("away")

    writer._connect = away  # type: ignore[method-assign]
    writer.step()
    assert writer.failing
    writer._connect = connect  # type: ignore[method-assign]
    writer.step()
    assert rows(url) == 1


def test_older_tables_are_read_and_completed(url: str, writers: Writers) -> None:
    """A database of a version without owners has its other tables, and gets the missing one."""
    engine = open_engine(url, writes=True)
    with engine.begin() as connection:
        METADATA.create_all(connection, [MINUTES, RUNS])
    assert owners(url, "test", "q", 0.0, limit=9) == []
    assert queue_reports(url, "test", 0.0) == []
    recorder, writer = writers(url)
    attempts(recorder, "q", 1)
    claim(recorder, "q", 1)
    writer.step()
    assert (rows(url), len(queue_reports(url, "test", 0.0))) == (1, 1)
