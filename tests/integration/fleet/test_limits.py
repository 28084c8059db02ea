"""Jobs with limits in real workers: never more at once than allowed, in the whole fleet."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest

import qdo
from qdo.fleet.limit_node import LimitNode, ShareHolder
from qdo.fleet.limits import LimitWish, delete_limit, list_limits, set_limit
from qdo.ops.status import QueueStatus, queue_statuses
from qdo.ops.verdicts import QueueHealth, QueueSample, judge
from tests.support.app_runs import AppRuns
from tests.support.processes import Proc, wait_until

JOBS = "from tests.apps.limited import app\n"
KINDS = ("thread", "greenlet", "process", "aio", "batch", "keyed", "both", "inner")


class LimitShop(AppRuns):
    """The app, its workers and its audit."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        super().__init__("desk", folder, coordinator)
        self.db = sqlite3.connect(folder / "audit.db", timeout=30, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=wal")
        self.db.execute("CREATE TABLE busy (queue, pid, name)")
        self.db.execute("CREATE TABLE seen (name, now, pid, at)")

    def limit(self, name: str, **wish: str) -> None:
        set_limit(self.client, self.layout, name, LimitWish(**wish))

    def start_all(self, count: int = 1, *options: str) -> list[Proc]:
        return [self.start(JOBS, *options) for _ in range(count)]

    def seen(self, name: str = "crm") -> list[int]:
        """Return how many were in use at each start."""
        rows = self.db.execute("SELECT now FROM seen WHERE name = ? ORDER BY at", (name,))
        return [now for (now,) in rows]

    def times(self, name: str) -> list[float]:
        rows = self.db.execute("SELECT at FROM seen WHERE name = ? ORDER BY at", (name,))
        return [at for (at,) in rows]

    def wait_for(self, count: int, name: str = "crm") -> None:
        wait_until(lambda: len(self.seen(name)) >= count, f"{count} starts of {name}", 60.0)

    def close(self) -> None:
        super().close()
        self.db.close()


@pytest.fixture
def shop(tmp_path: Path, coordinator_url: str) -> Iterator[LimitShop]:
    with contextlib.closing(LimitShop(tmp_path, coordinator_url)) as shop:
        yield shop


def test_every_executor_keeps_to_the_limit(shop: LimitShop) -> None:
    """Greenlets, threads, processes, asyncio, batches, keys, two limits, and `app.limit`."""
    shop.limit("crm", max="2")
    shop.limit("gpu", max="1")
    for kind in KINDS:
        for queue in range(3):
            shop.app.send_many(
                [qdo.NewMessage(f"{kind}-{queue}", body, key=f"k{body % 2}") for body in range(4)]
            )
    for worker in shop.start_all(2, "--burst"):
        assert worker.wait() == 0, worker.output
    seen = shop.seen()
    assert len(seen) == 12 * len(KINDS)
    assert max(seen) <= 2


def test_a_job_waits_for_a_limit_that_does_not_exist(shop: LimitShop) -> None:
    """The reason is logged once; when the limit is made, the queue continues."""
    shop.app.send("none-1", 1)
    shop.app.send("none-2", 1)
    shop.app.send("thread-1", 1)
    shop.limit("crm", max="1")
    (worker,) = shop.start_all()
    worker.wait_for_line(r"limit missing: it does not exist; run `qdo limits set missing`")
    shop.wait_for(1)
    assert shop.seen("missing") == []
    shop.limit("missing", max="1")
    shop.wait_for(2, "missing")
    assert worker.output.count("limit missing: it does not exist") == 1
    delete_limit(shop.client, shop.layout, "missing")
    shop.app.send("none-1", 2)
    worker.wait_for_line(r"limit missing: it does not exist", count=2)


def test_every_queue_that_waits_has_the_reason(shop: LimitShop) -> None:
    """Limits, free places and batches: no queue looks stopped, however many wait."""
    shop.limit("crm", max="0")
    waiting = [f"thread-{number}" for number in range(110)]
    places = [f"place-{number}" for number in range(5)]
    shop.app.send_many([(name, 1) for name in (*waiting, "none-1", "rest-1")])
    shop.start(JOBS, "--concurrency", "2")
    read = partial(queue_statuses, shop.client, shop.layout, shop.app.broker)
    found: dict[str, QueueStatus] = {}

    def statuses(glob: str) -> list[QueueStatus]:
        found.update({each.queue: each for each in read(glob).queues})
        return [each for name, each in found.items() if fnmatchcase(name, glob)]

    def all_wait() -> bool:
        return all(each.limits == ("crm",) for each in statuses("thread-*"))

    wait_until(all_wait, "each queue has the reason", 60.0)
    (fault,) = statuses("none-1")
    assert fault.fault is not None
    assert fault.fault.startswith("limit missing: it does not exist")
    assert statuses("rest-1")[0].rest_seconds == 600.0
    shop.app.send_many([(name, 1) for name in places])
    said = "waits for a free place: 2 of 2 jobs run, and 3 queues wait"
    wait_until(lambda: statuses("place-4")[0].in_line == said, said, 60.0)
    later = replace(found["place-4"], behind_seconds=90.0, written=1.0)
    sample = QueueSample(found["place-4"].reported or 0.0, later, 1)
    assert judge([sample]).state is QueueHealth.LAGGING
    (shop.folder / "go").touch()


def test_a_declared_limit_is_there_until_an_operator_sets_it(shop: LimitShop) -> None:
    """Workers make it before the first message, and a deployment changes it."""

    running: list[Proc] = []

    def deploy(most: int) -> None:
        for worker in running:
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0, worker.output
        # Another size each time: Python tells an old .pyc by size and second.
        source = f"{JOBS}\napp.limit('missing', max={most})\n" + "#" * most
        running[:] = [shop.start(source)]

    def terms() -> tuple[int | None, bool] | None:
        node = list_limits(shop.client, shop.layout).get("missing")
        return None if node is None else (node.max, node.declared)

    for most in (2, 3):
        deploy(most)
        wait_until(lambda most=most: terms() == (most, True), f"max {most}")
    shop.limit("missing", max="1")
    deploy(4)
    shop.app.send("none-1", 1)
    shop.wait_for(1, "missing")
    assert terms() == (1, False)
    delete_limit(shop.client, shop.layout, "missing")

    def is_declared() -> bool:
        shop.app.send("none-1", 2)  # the first one may start before its worker sees the deletion
        return terms() == (4, True)

    wait_until(is_declared, "the declared terms")


def test_a_script_declares_a_limit(shop: LimitShop) -> None:
    with shop.app.limit("mail", max=1, rate="20/s"):
        node = list_limits(shop.client, shop.layout)["mail"]
        assert (node.max, node.rate, node.burst, node.declared) == (1, 20.0, 20, True)
        assert shop.app.limit("mail").try_acquire() is None


def test_a_rate_holds_for_the_fleet(shop: LimitShop) -> None:
    """By default at most so many start in any second."""
    shop.limit("api", rate="40/s")
    for queue in range(6):
        shop.app.send_many([(f"rated-{queue}", body) for body in range(25)])
    shop.start_all(2)
    shop.wait_for(150, "api")
    times = shop.times("api")
    # The sink writes the time a moment after the start.
    assert all(later - at > 0.9 for at, later in zip(times, times[40:], strict=False))


@pytest.mark.parametrize("kind", ["own", "keyedown"])
def test_a_queue_has_a_rate_of_its_own(shop: LimitShop, kind: str) -> None:
    """No coordination: a queue has one owner. Messages in parallel share its rate."""
    shop.app.send_many(
        [
            qdo.NewMessage(f"{kind}-{queue}", body, key=f"k{body}")
            for queue in range(3)
            for body in range(6)
        ]
    )
    for worker in shop.start_all(2, "--burst"):
        assert worker.wait() == 0, worker.output
    for queue in range(3):
        times = shop.times(f"{kind}-{queue}")
        assert len(times) == 6
        assert times[-1] - times[0] > 5 * 0.05 - 0.03


def test_shares_end_with_their_processes_in_commands(shop: LimitShop) -> None:
    """Also before another process needs them and removes them from the node."""
    shop.limit("crm", max="2")
    holders = [ShareHolder(name, 1, 1) for name in ("worker-0000000001", "client/h-0000000002")]
    path = shop.layout.fleet.limit("crm")
    shop.client.set(path, LimitNode(max=2, permits=tuple(holders)).encode())
    assert list_limits(shop.client, shop.layout)["crm"].permits == ()
    shop.client.ensure_path(f"{shop.layout.components}/{holders[1].worker}")
    assert list_limits(shop.client, shop.layout)["crm"].permits == (holders[1],)


def wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_kills_stops_and_changes_never_exceed_the_limit(shop: LimitShop) -> None:
    """Six processes; a shared audit counts who is within a job."""
    shop.limit("crm", max="3")
    queues = [f"thread-{number}" for number in range(24)]
    shop.app.send_many([(queue, body) for queue in queues for body in range(60)])
    shop.start_all(6)
    shop.wait_for(40)
    for turn in range(6):
        count = len(shop.seen())
        victim = [pid for (pid,) in shop.db.execute("SELECT DISTINCT pid FROM busy")]
        alive = [pid for pid in victim if os.path.exists(f"/proc/{pid}")]
        if alive and turn % 2:
            os.kill(alive[0], signal.SIGKILL)
        elif alive:
            os.kill(alive[0], signal.SIGSTOP)
            # It may hold the write lock of the audit or of the broker: others then wait for it.
            threading.Timer(1.0, wake, (alive[0],)).start()
        shop.wait_for(count + 60)
        assert max(shop.seen()) <= 3
    shop.limit("crm", max="0")
    wait_until(lambda: _in_use(shop) == 0, "every permit is free", 20.0)
    before = len(shop.seen())
    shop.limit("crm", max="1")
    shop.wait_for(before + 20)
    assert max(shop.seen()[before:]) == 1
    shop.limit("crm", max="6")
    wait_until(lambda: max(shop.seen()[before:]) > 3, "more at once", 30.0)
    assert max(shop.seen()[before:]) <= 6


def _in_use(shop: LimitShop) -> int:
    held = list_limits(shop.client, shop.layout)["crm"].permits
    return sum(each.held for each in held)
