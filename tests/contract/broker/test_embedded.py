"""Promises of the embedded broker alone: its clock, its groups, its addresses."""

from __future__ import annotations

import fcntl
import multiprocessing
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from qdo.brokers.base import Outgoing
from qdo.brokers.embedded.broker import RETIRE_CHUNK, EmbeddedBroker
from qdo.brokers.registry import open_broker
from qdo.errors import DatabaseBusyError, DatabaseError, QdoError, SettingsError, UsageError
from qdo.positions import position_now, position_of_time, time_of_position
from tests.support.fakes.clocks import SettableClock
from tests.support.processes import wait_until

HOUR = 3600 * 10_000_000
SENDERS = 32


@pytest.fixture
def clock() -> SettableClock[int]:
    return SettableClock(position_of_time(1_700_000_000))


@pytest.fixture
def broker(path: str, clock: SettableClock[int]) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(path, "app", clock)
    yield broker
    broker.close()


def positions(broker: EmbeddedBroker, name: str) -> list[int]:
    return [row[0] for row in broker.reader(name, 0).fetch(10_000)]


# --- positions ----------------------------------------------------------------------


def test_a_position_is_the_time_of_the_send(
    broker: EmbeddedBroker, clock: SettableClock[int]
) -> None:
    """While the clock advances, positions are exactly its times."""
    for _ in range(3):
        broker.send(Outgoing("q", b"1"))
        clock.now += 12345
    first = position_of_time(1_700_000_000)
    assert positions(broker, "q") == [first, first + 12345, first + 2 * 12345]
    assert time_of_position(positions(broker, "q")[0]) == 1_700_000_000


def test_a_clock_set_back_by_an_hour_does_not_break_the_order(
    broker: EmbeddedBroker, clock: SettableClock[int], path: str
) -> None:
    """Positions continue from the newest of the whole file, even in a process started then,
    and follow the clock again once it has caught up."""
    broker.send_many([Outgoing("a", b"1"), Outgoing("b", b"2")])
    newest = positions(broker, "b")[0]
    clock.now -= HOUR
    broker.send(Outgoing("a", b"3"))
    other = EmbeddedBroker(path, "another app", clock)
    other.send(Outgoing("c", b"4"))
    other.close()
    broker.send(Outgoing("b", b"5"))
    assert positions(broker, "a")[1:] == [newest + 1]
    assert positions(broker, "b")[1:] == [newest + 3]
    clock.now += 2 * HOUR
    broker.send(Outgoing("a", b"6"))
    assert positions(broker, "a")[-1] == clock.now


def test_listeners_wake_after_the_clock_was_set_back(
    broker: EmbeddedBroker, clock: SettableClock[int]
) -> None:
    """New messages are found by position, so positions must not fall behind those already seen."""
    broker.send(Outgoing("q", b"1"))
    woken = threading.Event()
    stop = broker.listen(lambda names: woken.set())
    clock.now -= HOUR
    broker.send(Outgoing("q", b"2"))
    assert woken.wait(20)
    stop()


# --- group commit -------------------------------------------------------------------


@contextmanager
def write_lock(path: str) -> Iterator[None]:
    """Hold the file's write lock, as another process in the middle of a commit does."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("COMMIT")
        connection.close()


def send_at_once(broker: EmbeddedBroker, path: str, messages: list[Outgoing]) -> list[object]:
    """Send from one thread each while commits are blocked; return ids and errors in order."""
    outcomes: list[object] = [None] * len(messages)
    ready = threading.Barrier(len(messages) + 1)

    def send(number: int) -> None:
        ready.wait()
        try:
            outcomes[number] = broker.send(messages[number])
        except QdoError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=send, args=(n,)) for n in range(len(messages))]
    with write_lock(path):
        for thread in threads:
            thread.start()
        ready.wait()
        wait_until(lambda: broker.waiting == len(messages), "every call waits")
    for thread in threads:
        thread.join(20)
    return outcomes


def test_concurrent_sends_share_a_transaction(broker: EmbeddedBroker, path: str) -> None:
    """Thirty-two that wait for the lock together need two commits at most."""
    before = broker.commits
    outcomes = send_at_once(broker, path, [Outgoing("q", b"%d" % n) for n in range(SENDERS)])
    assert len(set(outcomes)) == SENDERS
    assert broker.catalog.backlog("q", 0).count == SENDERS
    assert broker.commits - before <= 2


def test_a_lone_send_is_committed_at_once(broker: EmbeddedBroker) -> None:
    """Each send by itself has its own commit: none waits for company."""
    before = broker.commits
    for _ in range(10):
        broker.send(Outgoing("q", b"1"))
    assert broker.commits - before == 10


def test_in_a_group_each_call_gets_its_own_error(broker: EmbeddedBroker, path: str) -> None:
    """A call that cannot be stored does not fail its neighbours."""
    messages = [Outgoing("q", b"%d" % n) for n in range(SENDERS)]
    unfit: object = ["no", "bytes"]
    messages[17] = Outgoing("q", unfit)  # type: ignore[arg-type]
    outcomes = send_at_once(broker, path, messages)
    assert isinstance(outcomes[17], DatabaseError)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == SENDERS - 1
    assert broker.catalog.backlog("q", 0).count == SENDERS - 1


def test_a_lock_held_for_long_is_an_error(
    broker: EmbeddedBroker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error contains how long the broker waited."""
    monkeypatch.setattr("qdo.brokers.embedded.writer.BUSY_SECONDS", 0.05)
    with write_lock(path), pytest.raises(DatabaseBusyError) as caught:
        broker.send(Outgoing("q", b"1"))
    assert caught.value.details == {"path": path, "seconds": 0.05}
    broker.send(Outgoing("q", b"2"))
    assert broker.catalog.backlog("q", 0).count == 1


def test_a_process_stopped_at_the_gate_does_not_stop_others(
    broker: EmbeddedBroker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate is for fairness; after a moment a sender continues without it."""
    monkeypatch.setattr("qdo.brokers.embedded.writer.GATE_SECONDS", 0.05)
    with open(f"{path}.wakeups/.gate") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        broker.send(Outgoing("q", b"1"))
    assert broker.catalog.backlog("q", 0).count == 1


# --- retention ----------------------------------------------------------------------


def test_retiring_works_in_short_transactions(broker: EmbeddedBroker) -> None:
    """A writer never waits for more than one chunk."""
    broker.send_many([Outgoing("q", b"1")] * (3 * RETIRE_CHUNK + 1))
    before = broker.commits
    assert broker.trim("q", position_now(), older_than=0) == 3 * RETIRE_CHUNK + 1
    assert broker.commits - before == 4


def test_retiring_nothing_takes_no_lock(broker: EmbeddedBroker, path: str) -> None:
    """Most calls find nothing to delete: they must not disturb senders."""
    broker.send(Outgoing("q", b"1"))
    with write_lock(path):
        assert broker.trim("q", 0, older_than=0) == 0
        assert broker.trim("q", position_now(), older_than=10**9) == 0


def test_messages_from_the_future_are_logged_once(
    broker: EmbeddedBroker,
    clock: SettableClock[int],
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, and not for those that wait: the file grows until that time, for all queues."""
    clock.now = position_now() + 24 * HOUR
    broker.send_many([Outgoing("q", b"1"), Outgoing("r", b"2")])
    assert broker.trim("q", 0, older_than=0) == 0
    assert caplog.text == ""
    for name in ("q", "q", "r"):
        (position,) = positions(broker, name)
        assert broker.trim(name, position, older_than=0) == 0
    (warning,) = caplog.records
    assert isinstance(warning.args, tuple)
    assert warning.args[0] == path


def test_positions_grow_after_a_deletion(broker: EmbeddedBroker, clock: SettableClock[int]) -> None:
    """Even if the clock was set back: a recorded position must not pass over new messages."""
    broker.send(Outgoing("q", b"1"))
    last = broker.catalog.head("q")
    broker.delete_queue("q", last)
    clock.now -= 10_000_000
    broker.send(Outgoing("q", b"2"))
    assert broker.catalog.head("q") > last


def test_a_large_queue_is_deleted_in_parts(broker: EmbeddedBroker) -> None:
    """Other writers get their turn in between."""
    broker.send_many([Outgoing("q", b"1")] * (3 * RETIRE_CHUNK))
    before = broker.commits
    broker.delete_queue("q", broker.catalog.head("q"))
    assert broker.commits - before >= 4
    assert broker.catalog.names() == []


# --- opening ------------------------------------------------------------------------


@pytest.mark.parametrize("app", ["", "a/b", ".."])
def test_an_impossible_app_name_is_refused(path: str, app: str) -> None:
    """The app becomes a znode, whichever broker it uses."""
    with pytest.raises(SettingsError) as caught:
        open_broker(f"sqlite:{path}", app)
    assert caught.value.details["name"] == "app"


def _use_after_fork(broker: EmbeddedBroker, answer: Connection) -> None:
    try:
        broker.send(Outgoing("q", b"from the child"))
    except UsageError as error:
        answer.send(str(error))
    broker.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: fork with threads
def test_a_forked_process_must_open_its_own(broker: EmbeddedBroker) -> None:
    """SQLite's connections do not survive a fork; that of the parent keeps working."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_use_after_fork, args=(broker, sending))
    child.start()
    assert receiving.poll(20)
    assert "before the process forked" in receiving.recv()
    child.join(20)
    broker.send(Outgoing("q", b"from the parent"))
    assert broker.catalog.backlog("q", 0).count == 1


def test_a_sender_that_died_before_it_rang_is_noticed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listeners also look from time to time without a ring."""
    monkeypatch.setattr("qdo.brokers.embedded.reader.LOOK_SECONDS", 0.05)
    rings: Callable[[str], None] = lambda folder: None  # noqa: E731
    monkeypatch.setattr("qdo.system.wakeup_pipes.notify_all", rings)
    broker = open_broker(f"sqlite:{path}", "app")
    woken = threading.Event()
    stop = broker.listen(lambda names: woken.set())
    broker.send(Outgoing("q", b"1"))
    assert woken.wait(20)
    stop()
    broker.close()


def test_a_file_keeps_its_identity_and_another_has_its_own(path: str, tmp_path: Path) -> None:
    """Workers compare it; an app has no part in it."""
    found = []
    for place, app in ((path, "a"), (path, "b"), (str(tmp_path / "other.db"), "a")):
        broker = EmbeddedBroker(place, app)
        found.append(broker.identity)
        broker.close()
    assert found[0] == found[1] != found[2]
    assert all(found)
