"""Permits of scripts: never more than the limit, whatever happens to processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo import App
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import LimitNotFoundError, LimitTimeoutError, PermitLostError, SharedNameError
from qdo.fleet import permits
from qdo.fleet.limits import LimitWish, delete_limit, set_limit
from tests.soak.log_rules import LimitRules
from tests.support.coordinator_process import connected
from tests.support.processes import Proc, freeze, wait_until
from tests.support.zookeeper import Ensemble
from tests.support.zookeeper_txn_log import read_log

LAYOUT = Layout.of("shop")
CALLER = ("-m", "tests.apps.callers.caller")
TAKER = ("-m", "tests.apps.callers.taker")
TAKERS = 12


@pytest.fixture
def app(coordinator_url: str) -> Iterator[App]:
    with App("shop", coordinator=coordinator_url, session_timeout_seconds=1) as app:
        yield app


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(tmp_path / "audit.db", timeout=30, isolation_level=None)
    db.execute("PRAGMA journal_mode=wal")
    db.execute("CREATE TABLE busy (pid, who)")
    db.execute("CREATE TABLE seen (now, pid)")
    yield db
    db.close()


def _limit(client: Client, name: str, **wish: str) -> None:
    set_limit(client, LAYOUT, name, LimitWish(**wish))


def test_scripts_keep_to_a_limit_while_processes_end(
    coordinator_url: str, outsider: Client, audit: sqlite3.Connection, tmp_path: Path
) -> None:
    """Killed processes hold nothing forever, and no process gets more than is free."""
    _limit(outsider, "crm", max="2")
    chance = random.Random(7)

    def seen() -> int:
        found: int = audit.execute("SELECT count(*) FROM seen").fetchone()[0]
        return found

    with contextlib.ExitStack() as stack:

        def start() -> Proc:
            argv = (*CALLER, coordinator_url, str(tmp_path / "audit.db"))
            return stack.enter_context(Proc.python(*argv))

        running = [start() for _ in range(3)]
        for _ in range(4):
            before = seen()
            wait_until(lambda before=before: seen() >= before + 60, "60 calls", 60.0)  # type: ignore[misc]
            victim = chance.randrange(3)
            running[victim].kill()
            running[victim] = start()
        before = seen()
        wait_until(lambda: seen() >= before + 60, "60 calls at the end", 60.0)
    assert max(now for (now,) in audit.execute("SELECT now FROM seen")) == 2
    pids = audit.execute("SELECT count(DISTINCT pid) FROM seen").fetchone()[0]
    assert pids >= 4


def test_shares_keep_to_the_limit_and_go_round(zookeeper_server: Ensemble) -> None:
    """At every zxid, with twelve processes of unequal demand, and a limit that changes."""
    url, root = zookeeper_server.url("/permits"), f"/permits{LAYOUT.root}"

    def rules() -> LimitRules:
        found = LimitRules(root)
        found.replay(read_log(zookeeper_server.servers[0].folder))
        return found

    with contextlib.ExitStack() as stack:
        client = connect(url)
        client.open()
        stack.callback(client.close)
        stack.callback(client.stop)
        _limit(client, "crm", max="2")
        for number in range(TAKERS):
            stack.enter_context(Proc.python(*TAKER, url, str(1 + number % 3)))
        for most in ("1", "5", "2"):
            before = rules().turns
            wait_until(
                lambda before=before: (  # type: ignore[misc]
                    len(now := rules().turns) == TAKERS
                    and all(turns >= before[worker] + 3 for worker, turns in now.items())
                ),
                f"three turns of each process before max is {most}",
                120.0,
            )
            _limit(client, "crm", max=most)
    found = rules()
    assert found.violations == []
    assert found.most_overtaken <= 2


def test_a_frozen_holder_knows_that_its_permit_is_lost(
    app: App, coordinator_url: str, outsider: Client
) -> None:
    """Its permit goes to others when its session has ended; not before."""
    _limit(outsider, "crm", max="1")
    with Proc.python("-m", "tests.apps.callers.holder", coordinator_url, "limit") as holder:
        holder.wait_for_line("^held$")
        assert app.limit("crm").try_acquire() is None
        freeze(holder.pid, coordinator_url)
        with app.limit("crm", timeout_seconds=30) as held:
            os.kill(holder.pid, signal.SIGCONT)
            holder.wait_for_line("^lost$")
            assert held.valid
        assert not held.valid
        holder.wait_for_line("^again$")


def test_permits_of_one_process_are_counted(app: App, outsider: Client) -> None:
    """Threads, tries, blocks that end with an error, and permits that are released twice."""
    _limit(outsider, "crm", max="2")
    with app.limit("crm") as one, app.limit("crm") as two:
        assert one.valid
        assert two.valid
        assert app.limit("crm").try_acquire() is None
        with pytest.raises(LimitTimeoutError), app.limit("crm", timeout_seconds=0.05):
            pass
    with pytest.raises(PermitLostError):
        one.check()
    held = app.limit("crm").try_acquire()
    assert held is not None
    with pytest.raises(ZeroDivisionError), app.limit("crm", timeout_seconds=10):
        raise ZeroDivisionError
    held.release()
    held.release()
    with app.limit("crm", timeout_seconds=10), app.limit("crm", timeout_seconds=10):
        assert app.limit("crm").try_acquire() is None


def test_a_free_permit_is_acquired_without_waiting(app: App, outsider: Client) -> None:
    _limit(outsider, "crm", max="1")
    with app.limit("crm", timeout_seconds=0) as held:
        held.check()
        with pytest.raises(LimitTimeoutError), app.limit("crm", timeout_seconds=0):
            pass


def test_a_slow_answer_does_not_mean_that_none_is_free(embedded_url: str) -> None:
    """The coordinator is locked for longer than a try waits for permits of others."""
    path = embedded_url.removeprefix("sqlite:")
    with contextlib.ExitStack() as stack:
        app = stack.enter_context(App("shop", coordinator=embedded_url))
        outsider = stack.enter_context(connected(embedded_url))
        for name in ("first", "crm"):
            _limit(outsider, name, max="1")
        with app.limit("first", timeout_seconds=0):
            pass  # from now on the process is registered
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        stack.enter_context(contextlib.closing(other))
        other.execute("BEGIN IMMEDIATE")
        unlock = threading.Timer(2 * permits.TRY_SECONDS, other.execute, ("ROLLBACK",))
        stack.callback(unlock.join)
        unlock.start()
        with app.limit("crm", timeout_seconds=0) as held:
            held.check()


def test_an_interrupted_caller_leaves_no_permit_behind(
    app: App, outsider: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is stopped at its deadline while it waits, or Ctrl-C ends a script's wait."""
    _limit(outsider, "crm", max="1")

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    real = permits._Waiter
    with app.limit("crm", timeout_seconds=10):
        monkeypatch.setattr(permits, "_Waiter", lambda event: real(Interrupted()))
        with pytest.raises(KeyboardInterrupt), app.limit("crm"):
            pass
        monkeypatch.undo()
    with app.limit("crm", timeout_seconds=10) as held:
        held.check()


def test_limits_taken_together_end_in_no_deadlock(app: App, outsider: Client) -> None:
    """Callers that name them in another order wait for each other's end only."""
    _limit(outsider, "crm", max="1")
    _limit(outsider, "gpu", max="1")
    done: list[int] = []

    def work(number: int) -> None:
        names = ("crm", "gpu") if number % 2 else ("gpu", "crm")
        for _ in range(5):
            with app.limit(*names, timeout_seconds=60):
                done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 20
    for outer, inner in (("crm", "gpu"), ("gpu", "crm")):
        with app.limit(outer, timeout_seconds=10), app.limit(inner, timeout_seconds=10):
            assert app.limit(outer).try_acquire() is None


def test_limits_that_cannot_be_used_are_reported(app: App, outsider: Client) -> None:
    """A name that no node can have, a limit that does not exist, and one that comes later."""
    for name in ("a/b", "", "x" * 300, "\U0001f600"):
        with pytest.raises(SharedNameError):
            app.limit(name)
    with pytest.raises(LimitNotFoundError), app.limit("crm"):
        pass
    _limit(outsider, "crm", max="1")
    with app.limit("crm", timeout_seconds=10):
        pass
    delete_limit(outsider, LAYOUT, "crm")

    def is_missing() -> bool:
        try:
            with app.limit("crm", timeout_seconds=10):
                return False
        except LimitNotFoundError:
            return True

    wait_until(is_missing, "the deletion is known")
