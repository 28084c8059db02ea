"""The contract of every broker with the owner of a queue, for logs and mailboxes.

What only some brokers can is left out where `Capabilities` says that this one cannot.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from qdo.brokers.base import Outgoing, Row, SendOptions
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.registry import kind_of
from qdo.errors import MessageTooLargeError, QdoError, UnsupportedError, UsageError
from qdo.positions import time_of_position
from qdo.testing.contracts.fixtures import (
    WAIT_SECONDS,
    BrokerSetup,
    QueueOwner,
    dead_letter,
    recorded,
)

RAW = '{"content-type": "application/octet-stream"}'


def numbers(rows: list[Row]) -> list[int]:
    return [int(row.body) for row in rows]


def bodies(*found: int) -> list[bytes]:
    return [b"%d" % number for number in found]


# --- sending and fetching -----------------------------------------------------------------


def test_a_message_comes_to_its_owner_as_it_was_sent(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """Body, key and headers are kept to the letter, and absent ones stay absent."""
    sent = [
        Outgoing(made.queue(0), b'{"n": "\xc3\xbc"}', "key", '{"trace": "\\u0000"}'),
        Outgoing(made.queue(0), b"2"),
        Outgoing(made.queue(0), bytes(range(256)), "k/1 \u00fc", RAW),
    ]
    for message in sent:
        made.broker.send(message)
    found = {row.body: row for row in owner().fetch(3)}
    for message in sent:
        row = found[message.body]
        assert (row.key, row.headers) == (message.key, message.headers)
        assert type(row.body) is bytes


def test_all_messages_come_once(made: BrokerSetup, owner: Callable[..., QueueOwner]) -> None:
    """In the order in which they were sent, where the broker has one."""
    made.send(0, *bodies(*range(47)))
    whole = owner()
    rows = whole.take(47)
    assert Counter(numbers(rows)) == Counter(range(47))
    if made.ordered:
        assert numbers(rows) == list(range(47))
    assert whole.nothing_comes()


def test_a_key_keeps_its_order(made: BrokerSetup, owner: Callable[..., QueueOwner]) -> None:
    """Where the queue has an order at all: other keys may come in between."""
    made.broker.send_many(
        [Outgoing(made.queue(0), b"%d" % number, f"k{number % 3}") for number in range(30)]
    )
    whole = owner()
    rows = whole.take(30)
    assert sorted(numbers(rows)) == list(range(30))
    for key in ("k0", "k1", "k2"):
        of_key = [int(row.body) for row in rows if row.key == key]
        assert len(of_key) == 10
        if made.ordered:
            assert of_key == sorted(of_key)


def test_queues_are_kept_apart(made: BrokerSetup, owner: Callable[..., QueueOwner]) -> None:
    """A batch may go to several; each owner gets its own."""
    made.broker.send_many(
        [Outgoing(made.queue(number % 2), b"%d" % number) for number in range(20)]
    )
    for number in (0, 1):
        assert sorted(numbers(owner(number).fetch(10))) == list(range(number, 20, 2))


def test_ids_are_those_that_sending_returned(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """Ids are unique, and the same for every receiver of the message."""
    ids = made.send(0, *bodies(*range(12)))
    assert len(set(ids)) == 12
    whole = owner()
    assert sorted(map(whole.id_of, whole.take(12))) == sorted(ids)


def test_positions_grow_and_tell_the_time(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """In the order of delivery; `last` is near the time at which the message was sent."""
    made.send(0, *bodies(*range(25)))
    whole = owner()
    rows = whole.take(25)
    positions = [row.position for row in rows]
    assert positions == sorted(set(positions))
    lasts = [time_of_position(whole.broker.positions.to_time(each)) for each in positions]
    assert all(abs(each - time.time()) < 60 for each in lasts)
    assert len(lasts) == 25


def test_bodies_may_be_empty_or_large(made: BrokerSetup, owner: Callable[..., QueueOwner]) -> None:
    """From nothing to as much as the broker takes, and not more."""
    most = min(made.broker.capabilities.max_body_bytes, 300_000)
    limit = made.broker.capabilities.max_body_bytes
    sent = [b"", b"x" * (most - 200), bytes(1000)]
    for body in sent:
        made.broker.send(Outgoing(made.queue(0), body, None, RAW if body[:1] == b"\0" else None))
    found = [row.body for row in owner().fetch(3)]
    assert sorted(found) == sorted(sent)
    with pytest.raises(MessageTooLargeError):
        made.broker.send(Outgoing(made.queue(0), b"x" * (limit + 10_000)))


def test_a_queue_with_messages_is_listed(made: BrokerSetup) -> None:
    """It can be assigned; its order is not stronger than the broker's."""
    made.send(0, b"1")
    assert made.queue(0) in made.broker.catalog.names()
    assert made.broker.catalog.order(made.queue(0)) == ("queue" if made.ordered else "none")


def test_names_that_cannot_be_are_refused(made: BrokerSetup) -> None:
    """With a reason, and nothing is stored."""
    for name in ("a/b", "", "x" * 201, "\ud800"):
        with pytest.raises(QdoError) as refused:
            made.broker.send(Outgoing(name, b"1"))
        assert refused.value.exit_code in (2, 6)


def test_what_a_broker_cannot_it_refuses(made: BrokerSetup) -> None:
    """A delay or a deduplication key that would be passed over is an error."""
    can = made.broker.capabilities
    for able, terms in ((can.delay, SendOptions(due=4e9)), (can.dedup, SendOptions(dedup_key="d"))):
        if not able:
            with pytest.raises(UnsupportedError):
                made.broker.send(Outgoing(made.queue(0), b"1", terms=terms))


def test_an_empty_batch_is_nothing(made: BrokerSetup) -> None:
    """No message, no id, no queue."""
    before = made.broker.catalog.names()
    assert made.broker.send_many([]) == []
    assert made.broker.catalog.names() == before


def test_concurrent_senders_each_keep_their_order(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """Ten threads with keys of their own: nothing is lost, doubled or reordered."""

    def send(sender: int) -> list[str]:
        ids: list[str] = []
        for start in range(0, 20, 5):
            first, *others = [
                Outgoing(made.queue(0), b"%d" % number, f"s{sender}")
                for number in range(start, start + 5)
            ]
            ids += [made.broker.send(first), *made.broker.send_many(others)]
        return ids

    with ThreadPoolExecutor(10) as threads:
        sent = {each for ids in threads.map(send, range(10)) for each in ids}
    assert len(sent) == 200
    rows = owner().take(200)
    for sender in range(10):
        found = [int(row.body) for row in rows if row.key == f"s{sender}"]
        assert sorted(found) == list(range(20))
        if made.ordered:
            assert found == sorted(found)


def test_a_closed_broker_refuses_to_send(made: BrokerSetup) -> None:
    """Closing twice is allowed; sending afterwards is a mistake that is named."""
    made.broker.close()
    made.broker.close()
    with pytest.raises(UsageError, match="closed"):
        made.broker.send(Outgoing(made.queue(0), b"1"))


def test_closing_waits_for_what_was_begun(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """A send that runs while the broker closes is either stored or rejected."""
    stored: list[str] = []
    first = threading.Event()
    over = threading.Event()

    def send() -> None:
        with contextlib.suppress(UsageError):
            while not over.is_set():
                stored.append(made.broker.send(Outgoing(made.queue(0), b"1")))
                first.set()
                time.sleep(0)  # not every broker waits, and a greenlet must for others to run

    with ThreadPoolExecutor(4) as threads:
        senders = [threads.submit(send) for _ in range(4)]
        try:
            assert first.wait(WAIT_SECONDS)
            made.broker.close()
        finally:
            over.set()
        for each in senders:
            each.result(WAIT_SECONDS)
    heir = owner()
    heir.take(len(stored))
    assert heir.nothing_comes()


# --- the engine's calls for an owner's messages -------------------------------------------


def test_what_is_not_done_can_be_read_again(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """After a failure the engine goes back to the last message that is done."""
    made.send(0, *bodies(*range(8)))
    whole = owner()
    rows = whole.fetch(8)
    upto = whole.done(rows[:3])
    whole.rewound(upto)
    assert whole.fetch(5) == rows[3:]
    whole.rewound(upto)
    assert whole.fetch(5) == rows[3:]


def test_new_messages_come_while_others_are_in_flight(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """The next messages can be fetched before earlier ones are finished."""
    made.send(0, b"1", key="a")
    whole = owner()
    first = whole.fetch(1)
    made.send(0, b"2", key="b")
    assert numbers(whole.fetch(1)) == [2]
    assert numbers(first) == [1]


def test_a_message_wakes_its_owner(made: BrokerSetup, owner: Callable[..., QueueOwner]) -> None:
    """One that was sent while there was nothing to do."""
    made.send(0, b"0")
    whole = owner()
    whole.take(1)
    assert whole.nothing_comes()
    made.send(0, b"1")
    assert numbers(whole.fetch(1)) == [1]


# --- from one owner to the next -----------------------------------------------------------


def test_the_next_owner_goes_on_where_the_last_one_was(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """In good order nothing is repeated and nothing left out."""
    made.send(0, *bodies(*range(10)))
    first = owner()
    rows = first.fetch(10)
    upto = first.done(rows[:4])
    unconfirmed = first.leave()
    first.broker.close()  # its pending operations are finished then
    after = recorded(made.broker, upto)
    second = owner(0, after, tuple(unconfirmed))
    found = second.fetch(6)
    assert sorted(numbers(found)) == sorted(numbers(rows[4:]))
    if made.ordered:
        assert numbers(found) == numbers(rows[4:])
    second.done(found)
    assert second.nothing_comes()


def test_what_is_done_beyond_others_is_not_given_again(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """A mailbox deletes it; for a log, its owner records done messages, and skips them."""
    made.broker.send_many([Outgoing(made.queue(0), b"%d" % n, f"k{n}") for n in range(6)])
    first = owner()
    rows = first.fetch(6)
    first.done([row for row in rows if int(row.body) % 2])
    unconfirmed = first.leave()
    first.broker.close()
    second = owner(0, 0, tuple(unconfirmed))
    if made.broker.positions.stable:
        assert [row.position for row in second.fetch(6)] == [row.position for row in rows]
    else:
        assert sorted(numbers(second.take(3))) == [0, 2, 4]
        assert second.nothing_comes()


def test_positions_name_the_same_message_to_every_owner(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """So that its attempts are counted on."""
    made.send(0, *bodies(*range(5)))
    first = owner()
    name = first.broker.positions.identity
    names = {name(row.position) for row in first.fetch(5)}
    first.leave()
    first.broker.close()
    assert {name(row.position) for row in owner().fetch(5)} == names
    assert len(names) == 5


# --- dead letters -------------------------------------------------------------------------


@pytest.fixture
def with_letters(made: BrokerSetup) -> None:
    """Skip brokers without a store; those of Kinesis are in S3, see test_kinesis.py."""
    if not kind_of(made.url).keeps_dead_letters(made.url):
        pytest.skip("a broker at this address keeps no dead letters")


@pytest.mark.usefixtures("with_letters")
def test_a_dead_letter_is_kept_with_its_error(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """It is stored once, however often it is stored again, until an operator discards it."""
    made.send(0, b'{"n": 1}', key="k")
    (row,) = owner().fetch(1)
    letter = _letter(made, row)
    made.broker.dead_letters.store(letter)
    made.broker.dead_letters.store(letter)
    (found,) = made.broker.dead_letters.records(made.queue(0))
    assert (found.body, found.key, found.error) == (row.body, row.key, letter.error)
    assert (found.attempts, found.fence, found.worker) == (10, 42, letter.worker)
    place = (made.queue(0), found.position)
    assert made.broker.dead_letters.discard([place]) == [True]
    assert made.broker.dead_letters.records(made.queue(0)) == []


@pytest.mark.usefixtures("with_letters")
def test_a_dead_letter_that_is_retried_is_a_new_message(
    made: BrokerSetup, owner: Callable[..., QueueOwner]
) -> None:
    """With the id that it had before."""
    (sent,) = made.send(0, b"1")
    first = owner()
    (row,) = first.fetch(1)
    made.broker.dead_letters.store(_letter(made, row))
    first.done([row])
    (found,) = made.broker.dead_letters.records(made.queue(0))
    (position,) = made.broker.dead_letters.retry([(made.queue(0), found.position)])
    assert position is not None
    (again,) = first.fetch(1)
    assert again.body == b"1"
    assert sent in (again.headers or "")
    assert made.broker.dead_letters.records(made.queue(0)) == []


def _letter(made: BrokerSetup, row: Row) -> DeadLetterRecord:
    fields = {"body": row.body, "key": row.key, "headers": row.headers}
    return dead_letter(made.queue(0), row.position, **fields)
