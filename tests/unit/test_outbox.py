"""The outbox: a message is sent if its transaction is committed, and once."""

from __future__ import annotations

import contextlib
import datetime
import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, delete
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from qdo import App, Message
from qdo import outbox as outbox_module
from qdo.broker_errors import PostgresqlBusyError, UnusableBrokerError
from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.registry import open_broker
from qdo.encoding import parsed
from qdo.errors import MessageTooLargeError, QueueNameError, UnsupportedError, UsageError
from qdo.outbox import Outbox
from qdo.settings.vaults import marks_of
from qdo.system.native import native_lock
from qdo.worker.duties.leading import LOOK_SECONDS
from qdo.worker.duties.outbox_relay import POLL_SECONDS, RETRY_SECONDS, Relay
from tests.support.engine import until
from tests.support.fakes.clocks import SettableClock
from tests.support.fakes.key_files import key, write_keys
from tests.support.fakes.member import FakeMember
from tests.support.fakes.scripted_broker import ScriptedBroker

NOW = 1_800_000_000.0


class OutboxSetup:
    """An app's database with its outbox, a broker, and a member that leads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = SettableClock(NOW)
        self.engine = create_engine(f"sqlite:///{folder / 'app.db'}")
        self.broker = self.open_broker()
        self.outbox = self.make(App("shop"))
        self.member = FakeMember(None, now=self.clock)
        self.member.leading = True

    def open_broker(self) -> Broker:
        return open_broker(f"sqlite:{self.folder / 'messages.db'}", "shop")

    def make(self, app: App, **options: Any) -> Outbox:
        """Return another outbox in this database, with its table."""
        outbox = Outbox(app, self.engine, clock=self.clock, **options)
        with self.engine.begin() as connection:
            outbox.create(connection)
            outbox.create(connection)
        return outbox

    def put(self, *bodies: Any, queue: str = "orders", outbox: Outbox | None = None) -> list[str]:
        with Session(self.engine) as session, session.begin():
            return [(outbox or self.outbox).send(session, queue, body) for body in bodies]

    def relay(self) -> int:
        return self.outbox.relay(self.broker)

    def stored(self, queue: str = "orders") -> list[Message]:
        """Return the messages in a queue, as a job would see them."""
        return [
            Message(queue, position, body, key, parsed(headers) or {}, id=self.broker.id_node)
            for position, body, key, headers in self.broker.reader(queue, 0).fetch(10_000)
        ]

    def bodies(self, queue: str = "orders") -> list[Any]:
        return [each.body for each in self.stored(queue)]

    def step(self, relay: Relay) -> float:
        """Step until no outbox is being relayed: a step waits for its threads for a moment only."""
        while (pause := relay.step(self.member)) == POLL_SECONDS and not relay.quiet:
            pass
        return pause


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OutboxSetup]:
    stage = OutboxSetup(tmp_path)
    yield stage
    stage.broker.close()
    stage.engine.dispose()


# --- transactions ---------------------------------------------------------------------


def test_commit_sends_once(stage: OutboxSetup) -> None:
    """In the order of sending, under the ids that sending returned."""
    ids = stage.put(1, 2)
    ids += stage.put(3)
    assert stage.relay() == 3
    assert stage.relay() == 0
    assert stage.bodies() == [b"1", b"2", b"3"]
    assert [each.id for each in stage.stored()] == ids


def test_rollback_sends_nothing(stage: OutboxSetup) -> None:
    """Uncommitted messages do not exist."""
    with Session(stage.engine) as session:
        stage.outbox.send(session, "orders", 1)
        session.rollback()
    assert stage.relay() == 0
    assert stage.broker.catalog.names() == []


def test_a_deleted_row_is_never_sent(stage: OutboxSetup) -> None:
    """As the page says: an app cancels a message of the outbox in its transaction."""
    id, _ = stage.put(1, 2)
    table = stage.outbox.table
    with Session(stage.engine) as session, session.begin():
        session.execute(delete(table).where(table.c.id == id))
    stage.relay()
    assert stage.bodies() == [b"2"]


def test_nothing_is_sent_before_the_commit(stage: OutboxSetup) -> None:
    """A relay that looks meanwhile sees no row."""
    with Session(stage.engine) as session:
        stage.outbox.send(session, "orders", 1)
        assert stage.relay() == 0
        session.commit()
    assert stage.relay() == 1


def test_everything_of_a_message_arrives(stage: OutboxSetup) -> None:
    """Key, headers, kind and bytes, through a connection without mapper as well."""
    headers = {"source": "web"}
    with stage.engine.begin() as connection:
        sent = stage.outbox.send(connection, "orders", b"\x00\xff", "ada", headers, kind="Image")
    stage.relay()
    [found] = stage.stored()
    assert (found.id, found.body, found.key) == (sent, b"\x00\xff", "ada")
    assert (found.headers["source"], found.kind) == ("web", "Image")
    assert found.headers["content-type"] == "application/octet-stream"


def test_delayed_messages_wait_in_the_outbox(stage: OutboxSetup) -> None:
    """Until they are due; others pass them."""
    due = datetime.datetime.fromtimestamp(NOW + 10, datetime.UTC)
    with Session(stage.engine) as session, session.begin():
        stage.outbox.send(session, "orders", "later", at=due)
        stage.outbox.send(session, "orders", "now")
    assert stage.relay() == 1
    stage.clock.now += 10
    assert stage.relay() == 1
    assert stage.bodies() == [b'"now"', b'"later"']


# --- crashes and rivals ---------------------------------------------------------------


def test_a_relay_that_dies_after_sending(
    stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor sends the same rows again, with newer ones; nothing is there twice."""
    ids = stage.put(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "_delete", _die)
        with pytest.raises(KeyboardInterrupt):
            stage.relay()
    ids += stage.put(3)
    assert stage.relay() == 3
    assert stage.bodies() == [b"1", b"2", b"3"]
    assert [each.id for each in stage.stored()] == ids


def _die(*rest: Any) -> None:
    raise KeyboardInterrupt


def test_a_relay_that_was_frozen(stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read its rows, another relay sent and deleted them and newer ones; then it continues."""
    stage.put(1, 2)
    frozen = stage.outbox._oldest()
    stage.put(3)
    assert stage.relay() == 3
    stage.put(4)
    with monkeypatch.context() as patch:
        patch.setattr(stage.outbox, "_oldest", lambda held: frozen)
        stage.relay()
    assert stage.relay() == 1
    assert stage.bodies() == [b"1", b"2", b"3", b"4"]


def test_two_relays_at_once(stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read, send and delete as they like; each message is there once, and in order."""
    monkeypatch.setattr(outbox_module, "BATCH", 3)
    stage.put(*range(300))
    both_have_relayed = threading.Barrier(2)

    def relay() -> int:
        with contextlib.closing(stage.open_broker()) as own:
            first = stage.outbox.relay(own)
            both_have_relayed.wait(10)
            return first + sum(iter(lambda: stage.outbox.relay(own), 0))

    with ThreadPoolExecutor(2) as pool:
        counts = [each.result(60) for each in [pool.submit(relay) for _ in range(2)]]
    assert min(counts) > 0
    assert stage.bodies() == [str(number).encode() for number in range(300)]


def test_batches_are_bounded(stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows and by bytes; a body beyond the bytes goes by itself."""
    monkeypatch.setattr(outbox_module, "BATCH", 3)
    monkeypatch.setattr(outbox_module, "BATCH_BYTES", 100)
    stage.put(*range(4), b"x" * 60, b"x" * 60, b"x" * 500, 9)
    counts = []
    while count := stage.relay():
        counts.append(count)
    assert counts == [3, 2, 1, 1, 1]
    assert len(stage.bodies()) == 8


def test_a_refused_row_stays_and_later_ones_are_sent(
    stage: OutboxSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """In their order, those of its queue, too; until an operator lets it be sent again."""
    stage.put(0)
    stage.relay()
    stage.broker.max_queues = 1
    (refused,) = stage.put(1, queue="new")
    stage.put(2, 3)
    (dropped,) = stage.put(4, queue="newer")
    stage.put(5)
    assert stage.relay() == 5
    assert stage.relay() == 0
    assert stage.bodies() == [b"0", b"2", b"3", b"5"]
    found = stage.outbox.refused()
    assert [(row.id, row.queue) for row in found] == [(refused, "new"), (dropped, "newer")]
    assert all(row.refused.startswith("QueueLimitError") for row in found)
    assert all(each in caplog.text for each in (refused, dropped))
    stage.outbox.drop([dropped])
    stage.broker.max_queues = None
    stage.outbox.retry([refused, dropped])
    assert stage.relay() == 1
    assert [each.id for each in stage.stored("new")] == [refused]
    assert stage.outbox.counts()[1] == 0


def test_a_broker_that_is_closed_refuses_no_row(stage: OutboxSetup) -> None:
    """A worker that stops closes it while the relay's thread still sends."""
    stage.put(1)
    stage.broker.close()
    with pytest.raises(UnusableBrokerError):
        stage.relay()
    assert stage.outbox.counts()[1] == 0


@pytest.mark.parametrize("change", ["body = 'text'", "body = 5", "headers = x'ff'", "id = x'ff'"])
def test_a_row_of_other_types_stays_alone(stage: OutboxSetup, change: str) -> None:
    """SQLite lets an app store text as a body by SQL."""
    stage.put(1)
    with stage.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE qdo_outbox SET {change}")
    stage.put(2)
    assert stage.relay() == 2
    assert (stage.bodies(), stage.outbox.counts()[1]) == ([b"2"], 1)


@pytest.mark.parametrize("column", ["id", "queue", "key", "headers"])
def test_text_that_is_not_utf8_stops_no_other_row(stage: OutboxSetup, column: str) -> None:
    """SQLite stores it, and refuses to read it; the row is set aside and can be dropped."""
    stage.put(1)
    with stage.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE qdo_outbox SET {column} = CAST(x'636166e9' AS TEXT)")
    stage.put(2)
    assert stage.relay() == 1
    assert stage.bodies() == [b"2"]
    (refused,) = stage.outbox.refused()
    assert "cannot be read" in refused.refused
    assert (refused.queue == "?") == (column == "queue")
    stage.outbox.drop([refused.id])
    assert stage.outbox.counts()[1] == 0


def test_an_outage_while_rows_are_read_changes_none(
    stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is over before a row could be set aside would lose its queue."""
    stage.put(1)

    def away(query: Any) -> Any:
        raise OperationalError("SELECT", {}, sqlite3.OperationalError("database is locked"))

    with stage.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qdo_outbox SET headers = CAST(x'e9' AS TEXT)")
    with monkeypatch.context() as patch:
        patch.setattr(stage.outbox, "_read", away)
        with pytest.raises(OperationalError):
            stage.relay()
    assert stage.outbox.counts()[1] == 0


def test_a_busy_queue_delays_no_other(stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it has more rows than are sent at once; its own keep their order."""
    monkeypatch.setattr(outbox_module, "BATCH", 3)
    stage.put(*range(5), queue="busy")
    stage.put(5)
    real = stage.broker.send_many

    def send_many(messages: Sequence[Outgoing]) -> list[str]:
        if any(each.queue == "busy" for each in messages):
            raise PostgresqlBusyError(server="db", reason="a lock")
        return real(messages)

    with monkeypatch.context() as patch:
        patch.setattr(stage.broker, "send_many", send_many)
        assert stage.relay() == 1
        with pytest.raises(PostgresqlBusyError):
            stage.relay()
    assert [stage.relay() for _ in range(2)] == [3, 2]
    assert (stage.bodies(), len(stage.bodies("busy"))) == ([b"5"], 5)


# --- bad use --------------------------------------------------------------------------


def test_what_app_send_refuses_is_refused(stage: OutboxSetup) -> None:
    """In the transaction of the app, not later in that of a worker."""
    outbox = Outbox(App("shop", max_body_bytes=10), stage.engine)
    server = Outbox(App("shop", broker="postgresql://nowhere/shop"), stage.engine)
    with Session(stage.engine) as session:
        with pytest.raises(QueueNameError):
            outbox.send(session, "a/b", 1)
        with pytest.raises(UsageError, match="JSON"):
            outbox.send(session, "a", object())
        with pytest.raises(MessageTooLargeError):
            outbox.send(session, "a", "x" * 20)
        with pytest.raises(UsageError, match="surrogate"):
            outbox.send(session, "a", 1, "\ud800")
        with pytest.raises(UsageError, match="NUL"):
            server.send(session, "a", 1, "\0")


@pytest.mark.parametrize("wrong", [None, object(), Session])
def test_what_is_no_session(stage: OutboxSetup, wrong: Any) -> None:
    """It is named."""
    with pytest.raises(UsageError, match="Session or Connection"):
        stage.outbox.send(wrong, "a", 1)


def test_a_broker_that_does_not_deduplicate(stage: OutboxSetup) -> None:
    """A worker fails to start with it."""
    with pytest.raises(UnsupportedError, match=r"App\.send"):
        Relay([stage.outbox], ScriptedBroker())


def test_a_broker_that_deduplicates_for_too_short(
    stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SQS does: a relay that was away for longer would send twice."""
    short = ScriptedBroker()
    can = replace(short.capabilities, dedup=True, dedup_seconds=300.0)
    monkeypatch.setattr(short, "capabilities", can)
    with pytest.raises(UnsupportedError, match="7 days"):
        Relay([stage.outbox], short)


def test_the_table_may_be_one_of_the_apps(stage: OutboxSetup) -> None:
    """Under a name of its own, made with all others."""
    metadata, app = MetaData(), App("shop")
    stage.outbox = Outbox(app, stage.engine, table="mail", metadata=metadata)
    metadata.create_all(stage.engine)
    assert app.outboxes == [stage.outbox]
    stage.put(1)
    assert stage.relay() == 1


# --- the duty -------------------------------------------------------------------------


def test_only_the_leader_relays(stage: OutboxSetup) -> None:
    """A worker that is unsure does not relay, and a follower has nothing to wait for."""
    relay = Relay([stage.outbox], stage.broker)
    stage.put(1)
    assert relay.step(None) == LOOK_SECONDS
    assert not relay.quiet
    stage.member.leading = False
    assert relay.step(stage.member) == LOOK_SECONDS
    assert relay.quiet
    assert stage.broker.catalog.names() == []
    stage.member.leading = True
    assert stage.step(relay) == 0.0
    assert not relay.quiet
    assert stage.step(relay) == POLL_SECONDS
    assert relay.quiet
    assert stage.bodies() == [b"1"]


def test_a_database_that_fails_is_asked_again(
    stage: OutboxSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """The log states the reason, and the worker continues."""
    stage.outbox = Outbox(App("shop"), stage.engine, table="late")
    relay = Relay([stage.outbox], stage.broker)
    with caplog.at_level(logging.WARNING):
        assert stage.step(relay) == RETRY_SECONDS
    assert "no such table: late" in caplog.text
    assert not relay.quiet
    with stage.engine.begin() as connection:
        stage.outbox.create(connection)
    stage.put(1)
    assert stage.step(relay) == 0.0


def test_an_outbox_that_fails_does_not_hold_up_another(stage: OutboxSetup) -> None:
    """Their tables may be in different databases."""
    relay = Relay([Outbox(App("shop"), stage.engine, table="missing"), stage.outbox], stage.broker)
    stage.put(1)
    until(lambda: relay.step(stage.member) == 0.0)
    until(lambda: relay.step(stage.member) == RETRY_SECONDS)
    assert not relay.quiet
    assert stage.bodies() == [b"1"]


def test_an_outbox_that_hangs_does_not_hold_up_another(
    stage: OutboxSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is relayed once its database answers."""
    hanging = stage.make(App("shop"), table="hanging")
    answers = native_lock()
    answers.acquire()
    relay_hanging = hanging.relay

    def hang(broker: Broker) -> int:
        answers.acquire()
        return relay_hanging(broker)

    monkeypatch.setattr(hanging, "relay", hang)
    relay = Relay([hanging, stage.outbox], stage.broker)
    stage.put(1, outbox=hanging)
    for body in (2, 3):
        stage.put(body)
        until(lambda: relay.step(stage.member) == 0.0)  # a busy machine may need more than one look
    assert not relay.quiet
    assert stage.bodies() == [b"2", b"3"]
    answers.release()
    until(lambda: relay.step(stage.member) == 0.0)
    assert stage.bodies() == [b"2", b"3", b"1"]


def test_the_relay_proves_ids_where_others_may_send(
    stage: OutboxSetup,
) -> None:
    """With a key to sign: a worker on SQS drops ids without proof."""
    keys = write_keys(stage.folder / "keys", key("s1", "sign"))
    app = App("shop", broker="sqs://eu-west-1/shop-", keys=keys)
    stage.outbox = stage.make(app)
    (id,) = stage.put(1)
    stage.relay()
    (row,) = stage.broker.reader("orders", 0).fetch(1)
    marks = marks_of(app.settings, "shop", str)
    assert marks is not None
    assert marks.proven("orders", row[3], row[1]) == row[3]
    assert stage.stored()[0].id == id
