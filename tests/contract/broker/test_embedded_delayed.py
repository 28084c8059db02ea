"""Delays and deduplication in the embedded broker's file: its clock, faults, older files."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator

import pytest

from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.embedded.broker import EmbeddedBroker
from qdo.brokers.embedded.delayed import TRIM, move_due
from qdo.brokers.embedded.writer import Writer
from qdo.brokers.streams import first_shards
from qdo.errors import DatabaseError
from qdo.positions import position_of_time
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.fakes.clocks import SettableClock
from tests.support.processes import wait_until

NOW = 1_700_000_000.0


@pytest.fixture
def clock() -> SettableClock[float]:
    return SettableClock(NOW)


@pytest.fixture
def broker(path: str, clock: SettableClock[float]) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(path, "app", lambda: position_of_time(clock.now))
    yield broker
    broker.close()


def bodies(broker: EmbeddedBroker, name: str) -> list[bytes]:
    return [row[1] for row in broker.reader(name, 0).fetch(10_000)]


def count(path: str, table: str) -> int:
    connection = sqlite3.connect(path)
    (found,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    connection.close()
    return int(found)


def execute(path: str, statement: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()


def moved(broker: EmbeddedBroker, queue: str = "q") -> None:
    """Let a listener move the due messages, then stop it."""
    stop = broker.listen(lambda names: None)
    wait_until(lambda: broker.catalog.backlog(queue, 0).delayed == 0, "all have moved")
    stop()


def test_a_refused_message_keeps_its_position(
    broker: EmbeddedBroker, clock: SettableClock[float], path: str
) -> None:
    """Also while the clock is set back: the next message has another position, so another id."""
    broker.streams.add(first_shards("user", 2))
    (shard, _) = (each.queue for each in broker.streams.shards("user"))
    broker.send(Outgoing(shard, b"1", "a", terms=SendOptions(due=NOW + 60)))
    execute(path, "UPDATE delayed SET key = NULL")
    clock.now = NOW + 60
    moved(broker, shard)
    (letter,) = broker.dead_letters.records()
    clock.now = NOW
    broker.send(Outgoing("plain", b"2"))
    (row,) = broker.reader("plain", 0).fetch(1)
    assert row[0] > letter.position


def test_what_is_due_follows_the_clock(broker: EmbeddedBroker, clock: SettableClock[float]) -> None:
    """A clock that is set back delays them; positions never go back."""
    broker.send(Outgoing("q", b"later", terms=SendOptions(NOW + 60)))
    broker.send(Outgoing("q", b"now"))
    clock.now = NOW + 60
    moved(broker)
    clock.now = NOW - 3600
    broker.send(Outgoing("q", b"after"))
    assert bodies(broker, "q") == [b"now", b"later", b"after"]


def test_the_window_of_a_key_follows_the_clock(
    broker: EmbeddedBroker, clock: SettableClock[float]
) -> None:
    """It ends exactly after its seconds, counted from the first."""

    def send() -> str:
        return broker.send(Outgoing("q", b"1", terms=SendOptions(None, "k", 300.0)))

    first = send()
    clock.now += 299
    assert send() == first
    clock.now += 1
    second = send()
    assert second != first
    assert len(bodies(broker, "q")) == 2


def test_keys_that_are_over_are_forgotten(
    path: str, broker: EmbeddedBroker, clock: SettableClock[float]
) -> None:
    """Each key that is stored takes several old ones away: the table stays small."""
    for number in range(100):
        broker.send(Outgoing("q", b"1", terms=SendOptions(None, f"old {number}", 10.0)))
    assert count(path, "dedup") == 100
    clock.now += 10
    for number in range(100 // (TRIM - 1) + 1):
        broker.send(Outgoing("q", b"1", terms=SendOptions(None, f"new {number}", 10.0)))
    assert count(path, "dedup") == 100 // (TRIM - 1) + 1


def test_a_failed_batch_leaves_no_key_and_no_delay(path: str, broker: EmbeddedBroker) -> None:
    """Keys and delays are part of the transaction too."""
    execute(
        path,
        "CREATE TRIGGER refuse BEFORE INSERT ON messages WHEN new.body = x'626164'"
        " BEGIN SELECT RAISE(ABORT, 'refused'); END",
    )
    with pytest.raises(DatabaseError, match="refused"):
        broker.send_many(
            [
                Outgoing("q", b"1", terms=SendOptions(None, "k")),
                Outgoing("q", b"2", terms=SendOptions(NOW + 60)),
                Outgoing("q", b"bad"),
            ]
        )
    assert (count(path, "dedup"), count(path, "delayed"), broker.catalog.names()) == (0, 0, [])


def is_retry(record: logging.LogRecord) -> bool:
    """Return whether a log record announces a retry in 0.05 s."""
    return isinstance(record.args, tuple) and record.args[0] == 0.05


def test_a_move_that_fails_is_retried_and_loses_nothing(
    path: str,
    broker: EmbeddedBroker,
    clock: SettableClock[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failed transaction changes nothing, and a warning states when it is retried."""
    monkeypatch.setattr("qdo.brokers.embedded.delayed.RETRY_SECONDS", 0.05)
    refuse = "CREATE TRIGGER refuse BEFORE INSERT ON messages BEGIN SELECT RAISE(ABORT, 'no'); END"
    broker.send_many([Outgoing("q", b"%d" % n, terms=SendOptions(NOW + 60)) for n in range(3)])
    execute(path, refuse)
    clock.now += 60
    with caplog.at_level(logging.WARNING):
        stop = broker.listen(lambda names: None)
        wait_until(lambda: any(map(is_retry, caplog.records)), "the move has failed")
    assert (bodies(broker, "q"), broker.catalog.backlog("q", 0).delayed) == ([], 3)
    execute(path, "DROP TRIGGER refuse")
    wait_until(lambda: broker.catalog.backlog("q", 0).delayed == 0, "they have moved")
    assert bodies(broker, "q") == [b"0", b"1", b"2"]
    stop()


def test_a_retry_that_fails_leaves_the_letter(path: str, broker: EmbeddedBroker) -> None:
    """Message and letter change in one transaction."""
    for number in (1, 2):
        broker.dead_letters.store(dead_letter(position=number))
    execute(
        path,
        "CREATE TRIGGER refuse BEFORE DELETE ON dead_letters WHEN old.position = 2"
        " BEGIN SELECT RAISE(ABORT, 'refused'); END",
    )
    with pytest.raises(DatabaseError, match="refused"):
        broker.dead_letters.retry([("q", 1), ("q", 2)])
    assert [each.position for each in broker.dead_letters.records("q")] == [1, 2]
    assert bodies(broker, "q") == []


def test_a_listener_without_delays_does_not_write(path: str, broker: EmbeddedBroker) -> None:
    """It looks, but takes the write lock only when something is due."""
    broker.send(Outgoing("q", b"1", terms=SendOptions(NOW + 3600)))
    commits = broker.commits
    seen: list[str] = []
    other = EmbeddedBroker(path, "app")
    stop = broker.listen(seen.extend)
    for _ in range(5):
        other.send(Outgoing("q", b"2"))
    wait_until(lambda: bool(seen), "it was woken")
    stop()
    other.close()
    assert broker.commits == commits


def test_who_finds_nothing_to_move_wakes_nobody(path: str, broker: EmbeddedBroker) -> None:
    """Of many listeners all but one come too late at each due time."""
    writer = Writer(path, "app", f"{path}.wakeups")
    assert writer.run(lambda transaction: (move_due(transaction, 0), transaction.rings)) == (
        0,
        False,
    )
    writer.close()


def test_listeners_can_be_stopped_while_they_are_woken(broker: EmbeddedBroker) -> None:
    """At whatever moment: stopping does not ring a bell that its listener has closed."""
    for number in range(200):
        stop = broker.listen(lambda names: None)
        for _ in range(number % 3):
            broker.send(Outgoing("q", b"1"))
        stop()


def test_no_number_of_a_delayed_message_is_used_twice(broker: EmbeddedBroker) -> None:
    """An operator who discards what was listed does not hit a message that came later."""
    later = SendOptions(due=NOW + 3600)
    broker.send(Outgoing("q", b"1", terms=later))
    listed = broker.delayed.numbers("q")
    assert broker.delayed.discard("q", listed) == {*listed}
    broker.send(Outgoing("q", b"2", terms=later))
    assert broker.delayed.discard("q", listed) == set()
    assert len(broker.delayed.numbers("q")) == 1


def test_a_reader_of_a_deleted_queue_reads_no_other_one(broker: EmbeddedBroker) -> None:
    """It knows its queue by an id, which no later queue gets."""
    for name in ("first", "second"):
        broker.send(Outgoing(name, b"1"))
        reader = broker.reader(name, 0)
        (row,) = reader.fetch(10)
        broker.delete_queue(name, row[0])
        broker.send(Outgoing(f"after {name}", b"2"))
        assert list(reader.fetch(10)) == []
