"""The outbox: a message is sent if its transaction is committed, and once."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, delete
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


@pytest.fixture
def clock() -> SettableClock[float]:
    return SettableClock(NOW)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'app.db'}")
    yield engine
    engine.dispose()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = open_broker(f"sqlite:{tmp_path / 'messages.db'}", "shop")
    yield broker
    broker.close()


@pytest.fixture
def outbox(engine: Engine, clock: SettableClock[float]) -> Outbox:
    outbox = Outbox(App("shop"), engine, clock=clock)
    with engine.begin() as connection:
        outbox.create(connection)
        outbox.create(connection)
    return outbox


def put(outbox: Outbox, engine: Engine, *bodies: Any, queue: str = "orders") -> list[str]:
    with Session(engine) as session, session.begin():
        return [outbox.send(session, queue, body) for body in bodies]


def stored(broker: Broker, queue: str = "orders") -> list[Message]:
    """Return the messages in a queue, as a job would see them."""
    reader = broker.reader(queue, 0)
    rows = reader.fetch(10_000)
    return [
        Message(queue, position, body, key, parsed(headers) or {}, id=broker.id_node)
        for position, body, key, headers in rows
    ]


def bodies(broker: Broker, queue: str = "orders") -> list[Any]:
    return [each.body for each in stored(broker, queue)]


# --- transactions ---------------------------------------------------------------------


def test_commit_sends_once(outbox: Outbox, engine: Engine, broker: Broker) -> None:
    """In the order of sending, under the ids that sending returned."""
    ids = put(outbox, engine, 1, 2)
    ids += put(outbox, engine, 3)
    assert outbox.relay(broker) == 3
    assert outbox.relay(broker) == 0
    assert bodies(broker) == [b"1", b"2", b"3"]
    assert [each.id for each in stored(broker)] == ids


def test_rollback_sends_nothing(outbox: Outbox, engine: Engine, broker: Broker) -> None:
    """Uncommitted messages do not exist."""
    with Session(engine) as session:
        outbox.send(session, "orders", 1)
        session.rollback()
    assert outbox.relay(broker) == 0
    assert broker.catalog.names() == []


def test_a_deleted_row_is_never_sent(outbox: Outbox, engine: Engine, broker: Broker) -> None:
    """As the page says: an app cancels a message of the outbox in its transaction."""
    id, _ = put(outbox, engine, 1, 2)
    with Session(engine) as session, session.begin():
        session.execute(delete(outbox.table).where(outbox.table.c.id == id))
    outbox.relay(broker)
    assert bodies(broker) == [b"2"]


def test_nothing_is_sent_before_the_commit(outbox: Outbox, engine: Engine, broker: Broker) -> None:
    """A relay that looks meanwhile sees no row."""
    with Session(engine) as session:
        outbox.send(session, "orders", 1)
        assert outbox.relay(broker) == 0
        session.commit()
    assert outbox.relay(broker) == 1


def test_everything_of_a_message_arrives(outbox: Outbox, engine: Engine, broker: Broker) -> None:
    """Key, headers and bytes, through a connection without mapper as well."""
    with engine.begin() as connection:
        sent = outbox.send(connection, "orders", b"\x00\xff", "ada", {"source": "web"})
    outbox.relay(broker)
    [found] = stored(broker)
    assert (found.id, found.body, found.key) == (sent, b"\x00\xff", "ada")
    assert found.headers["source"] == "web"
    assert found.headers["content-type"] == "application/octet-stream"


def test_delayed_messages_wait_in_the_outbox(
    outbox: Outbox, engine: Engine, broker: Broker, clock: SettableClock[float]
) -> None:
    """Until they are due; others pass them."""
    due = datetime.datetime.fromtimestamp(NOW + 10, datetime.UTC)
    with Session(engine) as session, session.begin():
        outbox.send(session, "orders", "later", at=due)
        outbox.send(session, "orders", "now")
    assert outbox.relay(broker) == 1
    clock.now += 10
    assert outbox.relay(broker) == 1
    assert bodies(broker) == [b'"now"', b'"later"']


# --- crashes and rivals ---------------------------------------------------------------


def test_a_relay_that_dies_after_sending(
    outbox: Outbox, engine: Engine, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor sends the same rows again, with newer ones; nothing is there twice."""
    ids = put(outbox, engine, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "_delete", _die)
        with pytest.raises(KeyboardInterrupt):
            outbox.relay(broker)
    ids += put(outbox, engine, 3)
    assert outbox.relay(broker) == 3
    assert bodies(broker) == [b"1", b"2", b"3"]
    assert [each.id for each in stored(broker)] == ids


def _die(*rest: Any) -> None:
    raise KeyboardInterrupt


def test_a_relay_that_was_frozen(
    outbox: Outbox, engine: Engine, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read its rows, another relay sent and deleted them and newer ones; then it continues."""
    put(outbox, engine, 1, 2)
    frozen = outbox._oldest()
    put(outbox, engine, 3)
    assert outbox.relay(broker) == 3
    put(outbox, engine, 4)
    with monkeypatch.context() as patch:
        patch.setattr(outbox, "_oldest", lambda held: frozen)
        outbox.relay(broker)
    assert outbox.relay(broker) == 1
    assert bodies(broker) == [b"1", b"2", b"3", b"4"]


def test_two_relays_at_once(
    outbox: Outbox, engine: Engine, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read, send and delete as they like; each message is there once, and in order."""
    monkeypatch.setattr(outbox_module, "BATCH", 3)
    put(outbox, engine, *range(300))
    both_have_relayed = threading.Barrier(2)

    def relay() -> int:
        own = open_broker(f"sqlite:{tmp_path / 'messages.db'}", "shop")
        with contextlib.closing(own):
            first = outbox.relay(own)
            both_have_relayed.wait(10)
            return first + sum(iter(lambda: outbox.relay(own), 0))

    with ThreadPoolExecutor(2) as pool:
        counts = [each.result(60) for each in [pool.submit(relay) for _ in range(2)]]
    assert min(counts) > 0
    assert bodies(broker) == [str(number).encode() for number in range(300)]


def test_batches_are_bounded(
    outbox: Outbox, engine: Engine, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows and by bytes; a body beyond the bytes goes by itself."""
    monkeypatch.setattr(outbox_module, "BATCH", 3)
    monkeypatch.setattr(outbox_module, "BATCH_BYTES", 100)
    put(outbox, engine, *range(4), b"x" * 60, b"x" * 60, b"x" * 500, 9)
    counts = []
    while count := outbox.relay(broker):
        counts.append(count)
    assert counts == [3, 2, 1, 1, 1]
    assert len(bodies(broker)) == 8


def test_a_refused_row_stays_and_later_ones_are_sent(
    outbox: Outbox, engine: Engine, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """In their order, those of its queue, too; until an operator lets it be sent again."""
    put(outbox, engine, 0)
    outbox.relay(broker)
    broker.max_queues = 1
    (refused,) = put(outbox, engine, 1, queue="new")
    put(outbox, engine, 2, 3)
    (dropped,) = put(outbox, engine, 4, queue="newer")
    put(outbox, engine, 5)
    assert outbox.relay(broker) == 5
    assert outbox.relay(broker) == 0
    assert bodies(broker) == [b"0", b"2", b"3", b"5"]
    found = outbox.refused()
    assert [(row.id, row.queue) for row in found] == [(refused, "new"), (dropped, "newer")]
    assert all(row.refused.startswith("QueueLimitError") for row in found)
    assert all(each in caplog.text for each in (refused, dropped))
    outbox.drop([dropped])
    broker.max_queues = None
    outbox.retry([refused, dropped])
    assert outbox.relay(broker) == 1
    assert ([each.id for each in stored(broker, "new")], outbox.count_refused()) == ([refused], 0)


def test_a_broker_that_is_closed_refuses_no_row(
    outbox: Outbox, engine: Engine, broker: Broker
) -> None:
    """A worker that stops closes it while the relay's thread still sends."""
    put(outbox, engine, 1)
    broker.close()
    with pytest.raises(UnusableBrokerError):
        outbox.relay(broker)
    assert outbox.count_refused() == 0


@pytest.mark.parametrize("change", ["body = 'text'", "body = 5", "headers = x'ff'", "id = x'ff'"])
def test_a_row_of_other_types_stays_alone(
    change: str, outbox: Outbox, engine: Engine, broker: Broker
) -> None:
    """SQLite lets an app store text as a body by SQL."""
    put(outbox, engine, 1)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE qdo_outbox SET {change}")
    put(outbox, engine, 2)
    assert outbox.relay(broker) == 2
    assert (bodies(broker), outbox.count_refused()) == ([b"2"], 1)


def test_a_busy_queue_delays_no_other(
    outbox: Outbox, engine: Engine, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it has more rows than are sent at once; its own keep their order."""
    monkeypatch.setattr(outbox_module, "BATCH", 3)
    put(outbox, engine, *range(5), queue="busy")
    put(outbox, engine, 5)
    real = broker.send_many

    def send_many(messages: Sequence[Outgoing]) -> list[str]:
        if any(each.queue == "busy" for each in messages):
            raise PostgresqlBusyError(server="db", reason="a lock")
        return real(messages)

    with monkeypatch.context() as patch:
        patch.setattr(broker, "send_many", send_many)
        assert outbox.relay(broker) == 1
        with pytest.raises(PostgresqlBusyError):
            outbox.relay(broker)
    assert [outbox.relay(broker) for _ in range(2)] == [3, 2]
    assert (bodies(broker), len(bodies(broker, "busy"))) == ([b"5"], 5)


# --- bad use --------------------------------------------------------------------------


def test_what_app_send_refuses_is_refused(engine: Engine) -> None:
    """In the transaction of the app, not later in that of a worker."""
    outbox = Outbox(App("shop", max_body_bytes=10), engine)
    with Session(engine) as session:
        with pytest.raises(QueueNameError):
            outbox.send(session, "a/b", 1)
        with pytest.raises(UsageError, match="JSON"):
            outbox.send(session, "a", object())
        with pytest.raises(MessageTooLargeError):
            outbox.send(session, "a", "x" * 20)
        with pytest.raises(UsageError, match="surrogate"):
            outbox.send(session, "a", 1, "\ud800")
        server = Outbox(App("shop", broker="postgresql://nowhere/shop"), engine)
        with pytest.raises(UsageError, match="NUL"):
            server.send(session, "a", 1, "\0")


@pytest.mark.parametrize("wrong", [None, object(), Session])
def test_what_is_no_session(outbox: Outbox, wrong: Any) -> None:
    """It is named."""
    with pytest.raises(UsageError, match="Session or Connection"):
        outbox.send(wrong, "a", 1)


def test_a_broker_that_does_not_deduplicate(outbox: Outbox) -> None:
    """A worker fails to start with it."""
    with pytest.raises(UnsupportedError, match=r"App\.send"):
        Relay([outbox], ScriptedBroker())


def test_a_broker_that_deduplicates_for_too_short(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SQS does: a relay that was away for longer would send twice."""
    short = ScriptedBroker()
    can = replace(short.capabilities, dedup=True, dedup_seconds=300.0)
    monkeypatch.setattr(short, "capabilities", can)
    with pytest.raises(UnsupportedError, match="7 days"):
        Relay([outbox], short)


def test_the_table_may_be_one_of_the_apps(engine: Engine, broker: Broker) -> None:
    """Under a name of its own, made with all others."""
    metadata = MetaData()
    app = App("shop")
    outbox = Outbox(app, engine, table="mail", metadata=metadata)
    metadata.create_all(engine)
    assert app.outboxes == [outbox]
    put(outbox, engine, 1)
    assert outbox.relay(broker) == 1


# --- the duty -------------------------------------------------------------------------


@pytest.fixture
def member(clock: SettableClock[float]) -> FakeMember:
    made = FakeMember(None, now=clock)
    made.leading = True
    return made


def step(relay: Relay, member: FakeMember) -> float:
    """Step until no outbox is being relayed: a step waits for its threads for a moment only."""
    while (pause := relay.step(member)) == POLL_SECONDS and not relay.quiet:
        pass
    return pause


def test_only_the_leader_relays(
    outbox: Outbox, engine: Engine, broker: Broker, member: FakeMember
) -> None:
    """A worker that is unsure does not relay, and a follower has nothing to wait for."""
    relay = Relay([outbox], broker)
    put(outbox, engine, 1)
    assert relay.step(None) == LOOK_SECONDS
    assert not relay.quiet
    member.leading = False
    assert relay.step(member) == LOOK_SECONDS
    assert relay.quiet
    assert broker.catalog.names() == []
    member.leading = True
    assert step(relay, member) == 0.0
    assert not relay.quiet
    assert step(relay, member) == POLL_SECONDS
    assert relay.quiet
    assert bodies(broker) == [b"1"]


def test_a_database_that_fails_is_asked_again(
    engine: Engine, broker: Broker, member: FakeMember, caplog: pytest.LogCaptureFixture
) -> None:
    """The log states the reason, and the worker continues."""
    outbox = Outbox(App("shop"), engine)
    relay = Relay([outbox], broker)
    with caplog.at_level(logging.WARNING):
        assert step(relay, member) == RETRY_SECONDS
    assert "no such table: qdo_outbox" in caplog.text
    assert not relay.quiet
    with engine.begin() as connection:
        outbox.create(connection)
    put(outbox, engine, 1)
    assert step(relay, member) == 0.0


def test_an_outbox_that_fails_does_not_hold_up_another(
    outbox: Outbox, engine: Engine, broker: Broker, member: FakeMember
) -> None:
    """Their tables may be in different databases."""
    relay = Relay([Outbox(App("shop"), engine, table="missing"), outbox], broker)
    put(outbox, engine, 1)
    until(lambda: relay.step(member) == 0.0)
    until(lambda: relay.step(member) == RETRY_SECONDS)
    assert not relay.quiet
    assert bodies(broker) == [b"1"]


def test_an_outbox_that_hangs_does_not_hold_up_another(
    outbox: Outbox,
    engine: Engine,
    broker: Broker,
    member: FakeMember,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is relayed once its database answers."""
    hanging = Outbox(App("shop"), engine, table="hanging")
    with engine.begin() as connection:
        hanging.create(connection)
    answers = native_lock()
    answers.acquire()
    relay_hanging = hanging.relay

    def hang(broker: Broker) -> int:
        answers.acquire()
        return relay_hanging(broker)

    monkeypatch.setattr(hanging, "relay", hang)
    relay = Relay([hanging, outbox], broker)
    put(hanging, engine, 1)
    for body in (2, 3):
        put(outbox, engine, body)
        until(lambda: relay.step(member) == 0.0)  # a busy machine may need more than one look
    assert not relay.quiet
    assert bodies(broker) == [b"2", b"3"]
    answers.release()
    until(lambda: relay.step(member) == 0.0)
    assert bodies(broker) == [b"2", b"3", b"1"]


def test_the_relay_proves_ids_where_others_may_send(
    engine: Engine, broker: Broker, tmp_path: Path
) -> None:
    """With a key to sign: a worker on SQS drops ids without proof."""
    keys = write_keys(tmp_path / "keys", key("s1", "sign"))
    app = App("shop", broker="sqs://eu-west-1/shop-", keys=keys)
    outbox = Outbox(app, engine)
    with engine.begin() as connection:
        outbox.create(connection)
    (id,) = put(outbox, engine, 1)
    outbox.relay(broker)
    (row,) = broker.reader("orders", 0).fetch(1)
    marks = marks_of(app.settings, "shop", str)
    assert marks is not None
    assert marks.proven("orders", row[3], row[1]) == row[3]
    assert stored(broker)[0].id == id
