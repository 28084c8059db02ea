"""Requests in real workers that are killed, frozen and stopped; `tests.soak` plays far more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo.brokers.requests import WAITING, RequestRecord
from qdo.errors import RequestCancelledError, RequestFailedError
from qdo.requests.calls import Handle
from tests.soak.checks import Entry, read_journal
from tests.soak.request_app import POOLS
from tests.support.brokers import ADDRESSES
from tests.support.cli import WORKER, clean_environment
from tests.support.processes import Proc, children, freeze, wait_until

PATIENCE_SECONDS = 60.0
"""Limit of a recovery on a busy machine; 0.5 s after the event are usual."""


class PoolFleet:
    """Workers of the app of the soak, what they ran, and an asker."""

    def __init__(self, folder: Path, coordinator: str, broker: str) -> None:
        self.folder = folder
        self.broker_url = broker
        self.coordinator_url = coordinator
        self.journal = folder / "journal"
        self.journal.touch()
        self.app = qdo.App("soak", broker=broker)
        self.parents: list[Proc] = []

    def start(self, processes: int = 1, **settings: str) -> Proc:
        environment = {
            **clean_environment(),
            **settings,
            "QDO_COORDINATOR": self.coordinator_url,
            "QDO_BROKER": self.broker_url,
            "SOAK_JOURNAL": str(self.journal),
        }
        options = ("tests.soak.request_app:app", "--processes", str(processes))
        self.parents.append(Proc.python(*WORKER, *options, env=environment, cwd=self.folder))
        return self.parents[-1]

    def ask(self, pool: str, kind: str, seconds: float = 0.0) -> Handle:
        return self.app.request(pool, {"kind": kind, "seconds": seconds})

    def runs(self, handle: Handle, kinds: str = "S") -> list[Entry]:
        entries = read_journal(self.journal.read_text())
        return [each for each in entries if each.queue == handle.id and each.kind in kinds]

    def wait_for_run(self, handle: Handle, number: int = 1, kinds: str = "S") -> Entry:
        def ran() -> bool:
            return len(self.runs(handle, kinds)) >= number

        wait_until(ran, f"run {number} of a request, {kinds}", PATIENCE_SECONDS)
        return self.runs(handle, kinds)[number - 1]

    def record(self, handle: Handle) -> RequestRecord:
        record = self.app.broker.requests.find(handle.id)
        assert record is not None
        return record

    def parent_of(self, pid: int) -> Proc:
        return next(each for each in self.parents if pid in children(each.pid))

    def stop(self, parent: Proc) -> None:
        parent.send(signal.SIGTERM)
        assert parent.wait(PATIENCE_SECONDS) == 0, parent.output

    def close(self) -> None:
        for parent in self.parents:
            parent.__exit__(None, None, None)
        self.app.close()


def _crossed(*pair: str) -> Any:
    return pytest.param(pair, marks=pytest.mark.long("each part runs with another one as well"))


@pytest.fixture(
    params=[
        ("embedded", "embedded"),
        ("zookeeper", "postgresql"),
        _crossed("zookeeper", "embedded"),
        _crossed("embedded", "postgresql"),
    ],
    ids="-".join,
)
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PoolFleet]:
    coordinator, broker = request.param
    url = request.getfixturevalue(f"{coordinator}_url")
    made = PoolFleet(tmp_path, url, ADDRESSES[broker](tmp_path, "soak", request))
    yield made
    made.close()


def test_requests_of_killed_workers_run_again(
    fleet: PoolFleet, record_property: Callable[[str, object], None]
) -> None:
    """With a parent that closes the session, and, once all are killed, after the timeout."""
    fleet.start(2)
    fleet.start(1)
    for number, whole_tree in enumerate((False, True)):
        handle = fleet.ask("green", "long", 2.0)
        pid = fleet.wait_for_run(handle).pid
        parent = fleet.parent_of(pid)
        killed_at = time.monotonic()
        if whole_tree:
            parent.kill()
        else:
            os.kill(pid, signal.SIGKILL)
        again = fleet.wait_for_run(handle, 2)
        assert (again.fence, again.attempt) == (2, 2)
        assert again.pid != pid
        record_property(f"recovery {number}", round(again.at - killed_at, 3))
        assert handle.result(PATIENCE_SECONDS) == {"take": 2}


def test_the_result_of_a_frozen_worker_is_dropped(fleet: PoolFleet) -> None:
    for _ in range(2):
        fleet.start()
    handle = fleet.ask("thread", "long", 4.0)
    pid = fleet.wait_for_run(handle).pid
    freeze(pid, fleet.coordinator_url, fleet.broker_url)
    again = fleet.wait_for_run(handle, 2)
    assert again.pid != pid
    os.kill(pid, signal.SIGCONT)
    late = fleet.wait_for_run(handle, 1, "EX")
    assert (late.pid, late.fence) == (pid, 1)
    assert handle.result(PATIENCE_SECONDS) == {"take": 2}
    assert fleet.record(handle).take.number == 2


def test_executors_return_and_cancel(fleet: PoolFleet) -> None:
    fleet.start()
    quick = {pool: fleet.ask(pool, "quick") for pool in POOLS}
    assert {pool: each.result(PATIENCE_SECONDS) for pool, each in quick.items()} == {
        pool: {"take": 1} for pool in POOLS
    }
    long = [fleet.ask(pool, "long", 5.0) for pool in POOLS]
    for each in long:
        fleet.wait_for_run(each)
        assert each.cancel("not needed")
    for each in long:
        with pytest.raises(RequestCancelledError) as caught:
            each.result(PATIENCE_SECONDS)
        assert caught.value.details["reason"] == "not needed"
        assert fleet.runs(each, "E") == []


def test_a_refused_outcome_ends_its_request(fleet: PoolFleet) -> None:
    """On every executor: the job is not run again, its place is free, and a stop is not held up."""
    fleet.app.send("orders", 1)
    parent = fleet.start(QDO_MAX_QUEUES="1")
    body = {"kind": "quick", "seconds": 0.0}
    refused = [fleet.app.request(pool, body, then="one-too-many") for pool in POOLS]
    for each in refused:
        with pytest.raises(RequestFailedError) as caught:
            each.result(PATIENCE_SECONDS)
        assert "QueueLimitError" in caught.value.details["reason"]
        assert len(fleet.runs(each)) == 1
    for pool in POOLS:
        assert fleet.ask(pool, "quick").result(PATIENCE_SECONDS) == {"take": 1}
    fleet.stop(parent)


def test_a_stop_puts_requests_back(fleet: PoolFleet) -> None:
    """One is paused, and one waits in the worker for its start; neither has failed."""
    parent = fleet.start()
    paused = fleet.ask("green", "pause")
    first, held = fleet.ask("rated", "quick"), fleet.ask("rated", "quick")
    fleet.wait_for_run(paused)
    wait_until(lambda: paused.state == "paused", "it is paused", PATIENCE_SECONDS)
    assert first.result(PATIENCE_SECONDS) == {"take": 1}
    wait_until(lambda: held.state == "running", "a worker has the second one", PATIENCE_SECONDS)
    assert fleet.runs(held) == []
    fleet.stop(parent)
    for each in (paused, held):
        record = fleet.record(each)
        assert (record.state, record.failed, record.take.number) == (WAITING, 0, 1)
    fleet.start()
    assert held.result(PATIENCE_SECONDS) == {"take": 2}
    assert [each.attempt for each in fleet.runs(held)] == [1]
    wait_until(lambda: paused.state == "paused", "it is paused again", PATIENCE_SECONDS)
    paused.resume()
    assert paused.result(PATIENCE_SECONDS) == {"take": 2}
    assert [each.attempt for each in fleet.runs(paused)] == [1, 1]
