"""Locks among real processes that are killed, frozen and cut off."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import CoordinatorUnreachableError, LockLostError, LockTimeoutError, SharedNameError
from qdo.fleet import locks
from qdo.fleet.locks import CoordinatorLocks
from qdo.fleet.pauses import read_pauses
from qdo.ops.locks import locks as list_locks
from tests.support.processes import Proc, freeze, wait_until, whole_lines

LAYOUT = Layout.of("shop")
CONTENDER = ("-m", "tests.apps.callers.contender")


@pytest.fixture
def app(coordinator_url: str) -> Iterator[App]:
    with App("shop", coordinator=coordinator_url, session_timeout_seconds=1) as app:
        yield app


def test_one_holder_at_a_time_whatever_happens_to_processes(
    coordinator_url: str, tmp_path: Path
) -> None:
    """Holders come in the order of their fences; a killed or frozen one is passed over."""
    chance = random.Random(5)
    said = tmp_path / "said"
    said.touch()
    with contextlib.ExitStack() as stack:

        def start() -> Proc:
            return stack.enter_context(Proc.python(*CONTENDER, coordinator_url, str(said)))

        running = [start() for _ in range(4)]
        frozen: list[int] = []
        for number in range(6):
            before = len(whole_lines(said))
            wait_until(lambda before=before: len(whole_lines(said)) >= before + 40, "20 holders")  # type: ignore[misc]
            victim = chance.randrange(4)
            if number % 2:
                freeze(running[victim].pid, coordinator_url)
                frozen.append(running[victim].pid)
            else:
                os.kill(running[victim].pid, signal.SIGKILL)
            running[victim] = start()
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        before = len(whole_lines(said))
        wait_until(lambda: len(whole_lines(said)) >= before + 40, "20 holders at the end")
    lines = [line.split() for line in whole_lines(said)]
    fences = [int(fence) for _, _, fence in lines]
    assert fences == sorted(fences)
    for word, pid, fence in lines:
        if word == "out":
            assert ["in", pid, fence] in lines
    assert len({pid for _, pid, _ in lines}) >= 4


def test_a_frozen_holder_knows_that_it_has_lost_the_lock(app: App, coordinator_url: str) -> None:
    with Proc.python("-m", "tests.apps.callers.holder", coordinator_url, "lock") as holder:
        holder.wait_for_line("^held$")
        with pytest.raises(LockTimeoutError) as caught, app.lock("export", timeout_seconds=0.1):
            pass
        assert str(holder.pid) in caught.value.details["holder"]
        freeze(holder.pid, coordinator_url)
        with app.lock("export", timeout_seconds=30) as held:
            os.kill(holder.pid, signal.SIGCONT)
            holder.wait_for_line("^lost$")
            assert held.valid


def test_shared_holders_hold_it_together(app: App, coordinator_url: str) -> None:
    with App("shop", coordinator=coordinator_url) as other:
        with app.lock("export", shared=True) as one, other.lock("export", shared=True) as two:
            assert one.valid
            assert two.valid
            with pytest.raises(LockTimeoutError), other.lock("export", timeout_seconds=0.1):
                pass
        with other.lock("export", timeout_seconds=10) as alone:
            assert alone.fence > two.fence > one.fence
            with (
                pytest.raises(LockTimeoutError),
                app.lock("export", shared=True, timeout_seconds=0.1),
            ):
                pass


def test_whoever_gives_up_leaves_nothing_behind(app: App, outsider: Client) -> None:
    """No node of a caller who has left can get the lock later."""
    folder = LAYOUT.fleet.lock("export")
    with app.lock("export"):
        for _ in range(20):
            with pytest.raises(LockTimeoutError), app.lock("export", timeout_seconds=0.005):
                pass
        assert len(outsider.get_children(folder)) == 1
    assert outsider.get_children(folder) == []
    # Waiting on several threads of one process.
    order: list[int] = []

    def hold(number: int) -> None:
        with app.lock("export"):
            order.append(number)

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == list(range(8))
    assert outsider.get_children(folder) == []


def test_a_free_lock_is_acquired_without_waiting(app: App) -> None:
    with app.lock("export", timeout_seconds=0) as held:
        held.check()
        with pytest.raises(LockTimeoutError) as caught, app.lock("export", timeout_seconds=0):
            pass
    assert "waits for" in caught.value.details["holder"]
    with app.lock("export", timeout_seconds=0):
        pass


def test_a_forged_contender_is_listed(outsider: Client) -> None:
    path = f"{LAYOUT.fleet.lock('export')}/x-01234567-0000000000"
    outsider.create(path, b'{"who": 7, "at": 1' + b"0" * 400 + b"}", makepath=True)
    (row,) = list_locks(outsider, LAYOUT)
    assert (row.lock, row.who, row.since) == ("export", "", None)


def test_a_section_that_fails_to_begin_leaves_no_hold(
    app: App, outsider: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to its first write is lost, or the job is stopped while it waits for it."""
    real = locks.add_pause
    for error in (CoordinatorUnreachableError(url="", reason="the answer is lost"), SystemExit()):

        def lost(*args: Any, error: BaseException = error, **options: Any) -> int:
            real(*args, **options)
            raise error

        monkeypatch.setattr(locks, "add_pause", lost)
        with pytest.raises(type(error)), app.exclusive("a-*", timeout_seconds=10):
            pass
        assert read_pauses(outsider, LAYOUT).node.pauses == ()


def test_a_section_whose_end_is_stopped_ends_with_its_session(
    app: App, outsider: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(locks, "end_pauses", stopped)
    with pytest.raises(SystemExit), app.exclusive("a-*", timeout_seconds=10):
        pass
    assert outsider.get_children(f"{LAYOUT.components}/client") == []


def test_a_lost_connection_keeps_the_lock(app: App, coordinator_url: str) -> None:
    """As long as the session lives; the next lock of an ended session gets a new one."""
    with App("shop", coordinator=coordinator_url, session_timeout_seconds=1) as other:
        with app.lock("export") as held:
            locks = app._locks.get()
            assert isinstance(locks, CoordinatorLocks)
            locks.connection.client.drop_connection("the test cuts it")
            with pytest.raises(LockTimeoutError), other.lock("export", timeout_seconds=0.5):
                pass
            wait_until(lambda: held.valid, "the lease is valid again")
            locks.close()
            with pytest.raises(LockLostError):
                held.check()
            with other.lock("export", timeout_seconds=10) as second:
                assert second.fence > held.fence
        with app.lock("export", timeout_seconds=10) as third:
            assert third.fence > second.fence


@pytest.mark.parametrize("name", ["a/b", "", "..", "x" * 201, "\ud800"])
def test_names_that_cannot_be_locks(app: App, name: str) -> None:
    with pytest.raises(SharedNameError), app.lock(name):
        pass
