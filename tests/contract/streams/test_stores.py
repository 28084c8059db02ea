"""Streams on the brokers that store them: where a message goes, before and after a reshard."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from psycopg.errors import SerializationFailure

from qdo import App
from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.embedded.broker import SqliteBroker
from qdo.brokers.postgresql.broker import PostgresqlBroker
from qdo.brokers.streams import (
    StreamShard,
    check_ranges,
    find_shard,
    first_shards,
    key_hash,
    merge,
    split,
)
from qdo.errors import (
    BodyAuthenticationError,
    QueueLimitError,
    ShardStateError,
    UnsupportedError,
    UsageError,
)
from qdo.requests.replies import reply_messages
from qdo.sending.streams import MAP_SECONDS, Stream
from qdo.settings.settings import Settings
from qdo.settings.vaults import vault_of
from tests.support.brokers import rows
from tests.support.fakes.key_files import key, write_keys
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until

KEYS = [f"key-{number}" for number in range(20)]
LOW, LOWER = [key for key in KEYS if key_hash(key) < "80"][:2]
"""Keys of the first of two shards."""


@pytest.fixture
def app(broker: Broker) -> Iterator[App]:
    app = App("app")
    with app.override_broker(broker, Settings(app="app")):
        yield app


@pytest.fixture
def stream(app: App) -> Stream:
    """A stream of two shards whose map no send reads again."""
    stream = app.stream("user", shards=2)
    stream.queue("a")
    return stream


def divide(broker: Broker, queue: str, at: str | None = None) -> list[str]:
    children = split(broker.streams.shards("user"), queue, at)
    broker.streams.add(children)
    return [each.queue for each in children]


def join(broker: Broker, *queues: str) -> str:
    (child,) = merge(broker.streams.shards("user"), *queues)
    broker.streams.add([child])
    return child.queue


def contents(broker: Broker) -> dict[str, list[str | None]]:
    """Return the keys of the messages of each queue."""
    names = broker.catalog.names_to_show()
    return {name: [row.key for row in rows(broker, name)] for name in names}


def of(queue: str, shards: list[StreamShard]) -> list[str]:
    """Return those of `KEYS` that a shard has."""
    return [key for key in KEYS if find_shard(shards, queue).has(key_hash(key))]


def heir(broker: Broker, children: list[str]) -> str:
    """Return which child has the key `LOW`."""
    return next(each for each in children if LOW in of(each, broker.streams.shards()))


def test_the_first_use_creates_the_shards(app: App, connect: Callable[..., Broker]) -> None:
    """Of several that use it at once, one; a later number of shards changes nothing."""
    others = [App("app") for _ in range(4)]
    queues = ["user.-40", "user.40-80", "user.80-c0", "user.c0-"]

    def use(other: App) -> str:
        with other.override_broker(connect(), Settings(app="app")):
            return other.stream("user", shards=4).queue("key-1")

    with ThreadPoolExecutor(4) as threads:
        assert {*threads.map(use, others)} == {"user.80-c0"}
    assert app.stream("user", shards=8).queue("key-1") == "user.80-c0"
    assert app.broker.catalog.names() == queues
    assert [(each.queue, each.state) for each in app.broker.streams.shards()] == [
        (queue, "open") for queue in queues
    ]


def test_each_key_goes_to_its_shard(app: App, stream: Stream) -> None:
    """Whether one message is sent, many, or within a coroutine."""
    import asyncio

    stream.send(KEYS[0], 0, {"a": "b"})
    stream.send_many([(key, 0) for key in KEYS[1:10]])
    asyncio.run(stream.asend(KEYS[10], 0))
    asyncio.run(stream.asend_many([{"key": key, "body": 0} for key in KEYS[11:]]))
    shards = app.broker.streams.shards("user")
    assert contents(app.broker) == {each.queue: of(each.queue, shards) for each in shards}


def test_a_split_divides_what_is_sent_after_it(app: App, stream: Stream) -> None:
    """Old maps and names of sealed shards lead to the children, also twice removed."""
    broker = app.broker
    stream.send_many([(key, 1) for key in KEYS])
    before = contents(broker)
    low, high = divide(broker, "user.-80")
    lowest, _ = divide(broker, low, "10")
    assert broker.catalog.names() == ["user.-80", "user.80-"], "children are hidden"
    stream.send_many([(key, 2) for key in KEYS])
    app.send_many([("plain", 3), ("user.-80", 3, LOW), ("plain", 3)])
    shards, after = broker.streams.shards("user"), contents(broker)
    assert after.pop("plain") == [None, None]
    assert (after["user.-80"], after[low]) == (before["user.-80"], [])
    for queue in (lowest, "user.10-40", high):
        direct = [LOW] if LOW in of(queue, shards) else []
        assert after[queue] == of(queue, shards) + direct
    assert find_shard(shards, "user.-80").end == rows(broker, "user.-80")[-1].position
    assert find_shard(shards, low).end == 0
    assert {each.queue: each.state for each in shards} == {
        "user.-80": "sealed", "user.80-": "open", low: "sealed", high: "hidden",
        lowest: "hidden", "user.10-40": "hidden",
    }  # fmt: skip


def test_open_children_are_listed(app: App, stream: Stream) -> None:
    children = divide(app.broker, "user.-80")
    assert [each.queue for each in app.broker.streams.resharded() if each.hidden] == children
    app.broker.streams.open(children)
    app.broker.streams.open(children)
    assert app.broker.catalog.names() == sorted(["user.-80", "user.80-", *children])
    assert app.broker.streams.resharded() == []


def test_a_merge_gets_a_name_that_no_shard_had(app: App, stream: Stream) -> None:
    low, high = divide(app.broker, "user.-80")
    child = join(app.broker, high, low)
    assert child == "user.-80.2"
    assert divide(app.broker, child) == ["user.-40.2", "user.40-80.2"]
    whole = join(app.broker, "user.80-", "user.40-80.2", "user.-40.2")
    assert whole == "user.-"
    stream.send_many([(key, 1) for key in KEYS])
    assert contents(app.broker)[whole] == KEYS


def test_every_broker_has_the_ranges_that_were_planned(broker: Broker) -> None:
    """The server of PostgreSQL computes them by itself; ranges that return have numbers."""
    for count in (1, 16, 4096):
        planned = first_shards(f"s{count}", count)
        broker.streams.add(planned)
        assert broker.streams.shards(f"s{count}") == planned
    dice, known = random.Random(1), broker.streams.shards("s16")
    for _ in range(60):
        opened = sorted((each for each in known if each.end is None), key=lambda each: each.low)
        at = dice.randrange(len(opened) - 2)
        if len(opened) > 20 or dice.random() < 0.5:
            some = [each.queue for each in opened[at : at + dice.choice((2, 3))]]
            children = merge(known, *dice.sample(some, len(some)))
        else:
            children = split(known, opened[at].queue)
        broker.streams.add(children)
        known = broker.streams.shards("s16")
        assert known[-len(children) :] == children
    assert any(each.queue.endswith(".2") for each in known)
    check_ranges(known)


def test_what_cannot_be_divided_stays_as_it_is(app: App, stream: Stream) -> None:
    """A parent that another operator has sealed, a queue with the name of a child."""
    broker = app.broker
    shards = broker.streams.shards("user")
    first, second = split(shards, "user.-80"), split(shards, "user.-80", "20")
    broker.streams.add(first)
    for children in (second, merge(shards, "user.-80", "user.80-")):
        with pytest.raises(ShardStateError) as raised:
            broker.streams.add(children)
        assert raised.value.details["queue"] == "user.-80"
    assert {each.queue for each in broker.streams.shards()} == {
        *("user.-80", "user.80-", "user.-40", "user.40-80")
    }
    app.send("older.80-c0", 1)
    app.stream("older", shards=2).queue(LOW)
    with pytest.raises(ShardStateError) as raised:
        broker.streams.add(split(broker.streams.shards("older"), "older.80-"))
    assert raised.value.details["queue"] == "older.80-c0"
    assert find_shard(broker.streams.shards(), "older.80-").state == "open"


def test_each_name_of_a_shard_leads_to_that_of_the_key(app: App, stream: Stream) -> None:
    """Of another shard, of one that does not exist, and of a deleted one; at once or delayed."""
    stop = app.broker.listen(lambda names: None)
    for queue in ("user.80-", "user.-80", "user.20-40", "user.-", "user.80-.2"):
        app.send(queue, 1, LOW)
        app.send(queue, 1, LOW, dedup_key=queue)
        app.send(queue, 1, LOW, delay_seconds=0.01)
    wait_until(lambda: len(rows(app.broker, "user.-80")) == 15, "they are where their key is")
    assert {*app.broker.catalog.names()} == {"user.-80", "user.80-"}
    stop()


def test_a_queue_that_is_named_like_a_shard_is_none(
    app: App, connect: Callable[..., Broker], tmp_path: Path
) -> None:
    """Only the broker knows: the names of months are those of shards."""
    month, other = "user.2024-01", "user.2024-02"
    app.send(month, 1)
    assert app.broker.stream_of(month) == month
    app.stream("user", shards=2).queue(LOW)
    divide(app.broker, "user.-80")
    broker = connect()
    assert [broker.stream_of(each) for each in (month, "user.-80", "user.-40", "user")] == [
        *(month, "user", "user", "user")
    ]
    app.send(month, 2)
    assert [row.body for row in rows(broker, month)] == [b"1", b"2"]
    app.request("p", 1, then=month)
    keys = write_keys(tmp_path / "keys", key("k"))
    vault = vault_of(Settings(app="app", keys=keys), "app", broker.stream_of)
    assert vault is not None
    sealed = vault.seal(month, b"1", None)
    with pytest.raises(BodyAuthenticationError):
        vault.open(other, *sealed)


def test_a_message_without_a_key_is_refused(app: App, stream: Stream) -> None:
    """With those that are sent together with it; also by a shard that is open."""
    divide(app.broker, "user.-80")
    for queue in ("user.-80", "user.80-"):
        for terms in (None, SendOptions(None, "once"), SendOptions(time.time() + 60)):
            with pytest.raises(UsageError, match=r"stream\('user'\)"):
                app.broker.send_many(
                    [Outgoing("plain", b"1"), Outgoing(queue, b"1", None, None, terms)]
                )
    assert not any(contents(app.broker).values())
    assert app.broker.delayed.numbers("user.80-") == []


def test_delayed_messages_go_to_the_shard_of_their_time(app: App, stream: Stream) -> None:
    """One that was delayed before the split, and one behind an old map."""
    broker = app.broker
    stop = broker.listen(lambda names: None)
    at = time.time() + 0.5
    stream.send(LOW, "early", at=at)
    children = divide(broker, "user.-80")
    queue = heir(broker, children)
    stream.send(LOW, "late", at=at)
    wait_until(lambda: len(rows(broker, queue)) == 2, "they are due")
    assert [row.body for row in rows(broker, queue)] == [b'"early"', b'"late"']
    assert rows(broker, "user.-80") == []
    stop()


def test_a_plain_queue_may_be_named_like_a_shard(app: App) -> None:
    """Its messages stay its own once a stream has other shards, also those that are due later."""
    broker, terms = app.broker, SendOptions(due=time.time() + 0.2)
    broker.send(Outgoing("user.-80", b"delayed", terms=terms))
    app.stream("user", shards=4).send("a", 1)
    broker.send(Outgoing("user.-80", b"at once"))
    broker.listen(lambda names: None)
    wait_until(lambda: len(rows(broker, "user.-80")) == 2, "the delayed message")


def test_a_refused_delayed_message_delays_no_other(
    app: App, stream: Stream, connect: Callable[..., Broker]
) -> None:
    """It becomes a dead letter. Those of one batch keep their order; listeners start."""
    broker, due = app.broker, time.time() + 0.5
    messages = [
        Outgoing(queue, bytes([body]), key, None, SendOptions(due=due))
        for body in b"1234567"
        for queue, key in [("user.-80", LOW) if body in b"26" else ("plain", None)]
    ]
    broker.send_many(messages)
    remove_key(broker, b"2")
    for each in (broker, connect()):
        each.listen(lambda names: None)
    wait_until(lambda: not broker.delayed.numbers("plain"), "the delayed messages")
    broker.send(Outgoing("plain", b"8", terms=SendOptions(due=time.time() + 0.1)))
    wait_until(lambda: len(rows(broker, "plain")) == 6, "the next delayed message")
    assert b"".join(row.body for row in rows(broker, "plain")) == b"134578"
    assert [row.body for row in rows(broker, "user.-80")] == [b"6"]
    (letter,) = broker.dead_letters.records()
    found = (letter.queue, letter.body, letter.attempts, letter.dead_at > due - 1)
    assert found == ("user.-80", b"2", 0, True)
    assert "must have a key" in letter.error
    place = [(letter.queue, letter.position)]
    with pytest.raises(UsageError):
        broker.dead_letters.retry(place)
    assert broker.dead_letters.discard(place) == [True]


def remove_key(broker: Broker, body: bytes) -> None:
    """Take the key from a delayed message, as if its queue had become a shard since."""
    change = "UPDATE {}delayed SET key = NULL WHERE body = {}"
    if isinstance(broker, PostgresqlBroker):
        broker._writer.run(lambda each: each.execute(change.format("qdo.", "%s"), (body,)))
    elif isinstance(broker, SqliteBroker):
        broker._writer.run(lambda each: each.connection.execute(change.format("", "?"), (body,)))


def test_a_dead_letter_is_sent_again_to_the_shard_of_its_key(app: App, stream: Stream) -> None:
    broker = app.broker
    stream.send(LOW, 1)
    (row,) = rows(broker, "user.-80")
    letter = ("user.-80", row.position, row.body, row.key, row.headers)
    record = DeadLetterRecord(*letter, "error", "", 1, "worker", 1)
    broker.dead_letters.store(record)
    children = divide(broker, "user.-80")
    (position,) = broker.dead_letters.retry([("user.-80", row.position)])
    queue = heir(broker, children)
    assert [each.position for each in rows(broker, queue)] == [position]
    assert len(rows(broker, "user.-80")) == 1


def test_an_outcome_goes_to_the_shard_of_its_key(app: App, stream: Stream) -> None:
    """Also of a request that was asked for before the split."""
    app.request("p", 1, id="r", then=stream, key=LOW)
    children = divide(app.broker, "user.-80")
    (taken,) = app.broker.requests.take("w", "p", 1, []).requests
    told = reply_messages(app, taken.take, "p", taken.reply, "done", 2)
    assert app.broker.requests.end(taken.take, "done", (b"2", None), messages=told)
    (row,) = rows(app.broker, heir(app.broker, children))
    assert (row.key, json.loads(row.body)["result"]) == (LOW, 2)
    for then in (stream, "user.80-"):
        with pytest.raises(UsageError):
            app.request("p", 1, then=then)


def test_each_shard_opens_the_bodies_of_its_stream(
    app: App, stream: Stream, tmp_path: Path
) -> None:
    """Whichever of them a sender has encrypted it for; no other queue does."""
    keys = write_keys(tmp_path / "keys", key("k"))
    sealed = App("app", keys=keys, encrypt=("bodies",))
    with sealed.override_broker(app.broker, Settings(app="app", keys=keys, encrypt=("bodies",))):
        old = sealed.stream("user", shards=2)
        old.queue(LOW)
        children = divide(app.broker, "user.-80")
        old.send(LOW, {"n": 1})
        queue = heir(app.broker, children)
        (row,) = rows(app.broker, queue)
        vault = vault_of(sealed.settings, "app", app.broker.stream_of)
        assert vault is not None
        assert vault.open(queue, row.body, row.headers)[0] == b'{"n":1}'
        with pytest.raises(BodyAuthenticationError):
            vault.open("user", row.body + b"x", row.headers)
        with pytest.raises(BodyAuthenticationError):
            vault.open("another", row.body, row.headers)


def test_deduplication_outlives_a_split(app: App, stream: Stream) -> None:
    """A key counts for the key of its message: another one may be stored with it."""
    first = stream.send(LOW, 1, dedup_key="d")
    assert stream.send(LOWER, 1, dedup_key="d") != first
    divide(app.broker, "user.-80")
    assert stream.send(LOW, 1, dedup_key="d") == first
    divide(app.broker, "user.40-80")
    stream._map = None
    assert stream.send(LOW, 1, dedup_key="d") == first
    assert sum(map(len, contents(app.broker).values())) == 2


def test_a_sender_with_an_old_map_wakes_the_child(app: App, stream: Stream) -> None:
    """A listener is told of the queue that got the message, or looks which one it is."""
    woken = set[str]()
    stop = app.broker.listen(woken.update)
    children = divide(app.broker, "user.-80")
    stream.send(LOW, 1)
    wait_until(lambda: heir(app.broker, children) in woken, "the child is woken", 3)
    stop()


@pytest.mark.parametrize("connect", ["postgresql"], indirect=True)
def test_a_transaction_sends_to_the_shard_of_its_commit(
    app: App, stream: Stream, postgresql: PostgresqlDatabase
) -> None:
    with postgresql.connect() as connection:
        connection.autocommit = False
        stream.send(LOW, "staged", connection=connection)
        stream.send_many([(LOWER, "staged")], connection=connection)
        children = divide(app.broker, "user.-80")
        connection.commit()
    bodies = [row.body for queue in children for row in rows(app.broker, queue)]
    assert bodies == [b'"staged"'] * 2
    assert rows(app.broker, "user.-80") == []


@pytest.mark.parametrize("connect", ["postgresql"], indirect=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_from_before_a_split_sends_nothing(
    app: App, stream: Stream, postgresql: PostgresqlDatabase, level: str
) -> None:
    """The transaction fails at its commit, and its next attempt sends to the child."""
    with postgresql.connect() as connection:
        connection.autocommit = False
        for _ in range(2):
            connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
            connection.execute("SELECT FROM qdo.about")
            stream.send(LOW, "staged", connection=connection)
            if app.broker.streams.resharded():
                connection.commit()
                break
            children = divide(app.broker, "user.-80")
            with pytest.raises(SerializationFailure):
                connection.commit()
            connection.rollback()
    assert [len(rows(app.broker, each)) for each in ("user.-80", heir(app.broker, children))] == [
        *(0, 1)
    ]


@pytest.mark.parametrize("connect", ["postgresql"], indirect=True)
def test_the_end_is_found_in_any_partition(
    app: App, stream: Stream, postgresql: PostgresqlDatabase
) -> None:
    """And is what was trimmed if no message is left."""
    stream.send(LOW, 1)
    (row,) = rows(app.broker, "user.-80")
    ticks = 36_000_000_000
    with postgresql.connect() as connection:
        for number in range(1, 120):
            connection.execute("SELECT qdo.add_partition(qdo.clock() + %s)", (number * ticks,))
        newest = "SELECT qdo.newest(id, trimmed) FROM qdo.queues WHERE name = 'user.-80'"
        assert connection.execute(newest).fetchone() == (row.position,)
        app.broker.trim("user.-80", row.position, 0.0)
        assert connection.execute(newest).fetchone() == (row.position,)


@pytest.mark.parametrize("connect", ["embedded", "postgresql"], indirect=True)
def test_only_a_shard_that_is_over_can_be_deleted(app: App, stream: Stream) -> None:
    broker = app.broker
    stream.send(LOW, 1, dedup_key="d")
    with pytest.raises(ShardStateError):
        broker.delete_queue("user.-80", 1 << 62)
    children = divide(broker, "user.-80")
    with pytest.raises(ShardStateError):
        broker.delete_queue("user.-80", 1 << 62)
    broker.streams.open(children)
    broker.delete_queue("user.-80", 1 << 62)
    assert "user.-80" not in broker.catalog.names()
    stream.send(LOW, 1, dedup_key="d")
    assert not any(contents(broker).values()), "keys of the stream stay"
    assert split(broker.streams.shards("user"), "user.-40"), "its name stays known"


@pytest.mark.parametrize("connect", ["embedded", "postgresql"], indirect=True)
def test_a_reshard_keeps_to_max_queues(
    app: App, stream: Stream, connect: Callable[..., Broker]
) -> None:
    limited = connect()
    limited.max_queues = 3  # before its first write, at which PostgreSQL is told
    with pytest.raises(QueueLimitError):
        divide(limited, "user.-80")
    assert find_shard(limited.streams.shards(), "user.-80").state == "open"


def more(sent: list[int], count: int) -> bool:
    return len(sent) > count


def test_senders_at_a_reshard_lose_nothing(
    app: App, connect: Callable[..., Broker], stream: Stream
) -> None:
    """V1 to V3: the positions of a key grow from shard to shard, whatever each sender knows."""
    over, sent = threading.Event(), list[int]()
    broker = app.broker

    def send(number: int) -> None:
        mine = App("app")
        with mine.override_broker(connect(), Settings(app="app")):
            stream = mine.stream("user", shards=2)
            while not over.is_set():
                stream.send_many([(KEYS[number], len(sent)), (KEYS[number + 4], len(sent))])
                sent.append(number)

    with ThreadPoolExecutor(4) as senders:
        done = [senders.submit(send, number) for number in range(4)]
        wait_until(lambda: len(sent) > 20, "they send")
        try:
            for _ in range(6):
                before = len(sent)
                opened = [each.queue for each in broker.streams.shards() if each.end is None]
                if len(opened) < 5:
                    divide(broker, opened[0])
                else:
                    join(broker, *opened)
                wait_until(partial(more, sent, before + 20), "they go on")
        finally:
            over.set()
        for each in done:
            each.result()
    shards = broker.streams.shards("user")
    found = dict[str, list[tuple[int, str]]]()
    for shard in shards:
        for row in broker.reader(shard.queue, 0).fetch(1_000_000):
            assert shard.has(key_hash(row[2] or ""))
            assert shard.end is None or row[0] <= shard.end
            found.setdefault(row[2] or "", []).append((row[0], shard.queue))
    assert sum(map(len, found.values())) == 2 * len(sent)
    order = {shard.queue: number for number, shard in enumerate(shards)}
    for places in found.values():
        queues = [order[queue] for _, queue in sorted(places)]
        assert queues == sorted(queues)


@pytest.mark.parametrize(
    "send",
    [
        lambda stream: stream.send("", 1),
        lambda stream: stream.send(None, 1),
        lambda stream: stream.send("k" * 1001, 1),
        lambda stream: stream.send("\ud800", 1),
        lambda stream: stream.send("k", 1, queue="q"),
        lambda stream: stream.send("k", 1, wrong=2),
        lambda stream: stream.send_many([("k",)]),
        lambda stream: stream.send_many(["ab"]),
        lambda stream: stream.send_many([{"key": "k"}]),
        lambda stream: stream.queue(b"k"),
    ],
)
def test_wrong_messages_are_refused(send: Callable[[Stream], Any]) -> None:
    from qdo.testing import TestKit

    app = App("app")
    with TestKit(app), pytest.raises(UsageError):
        send(app.stream("user"))


def test_other_brokers_store_no_streams() -> None:
    with pytest.raises(UnsupportedError):
        Broker.streams.fget(None)  # type: ignore[attr-defined]
    assert MAP_SECONDS < 60
    assert len(first_shards("user", 4096)) == 4096
