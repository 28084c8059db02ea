"""The contract of a broker that can delay and deduplicate messages."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterable

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.encoding import ID
from qdo.message import Message
from qdo.positions import time_of_position
from qdo.testing.contracts.fixtures import WAIT_SECONDS


class Heard:
    """Collects the names that a listener is woken for."""

    def __init__(self, broker: Broker) -> None:
        self.names: queue.Queue[str] = queue.Queue()
        self.stop = broker.listen(self._wake)

    def _wake(self, names: Iterable[str]) -> None:
        for name in names:
            self.names.put(name)

    def wait(self, seconds: float = WAIT_SECONDS) -> str:
        return self.names.get(timeout=seconds)


def delayed(name: str, body: object, seconds: float, key: str | None = None) -> Outgoing:
    return Outgoing(name, json.dumps(body).encode(), terms=SendOptions(time.time() + seconds, key))


def once(name: str, body: object, key: str, seconds: float = 300.0) -> Outgoing:
    return Outgoing(name, json.dumps(body).encode(), terms=SendOptions(None, key, seconds))


def bodies(broker: Broker, name: str) -> list[object]:
    return [json.loads(row[1]) for row in broker.reader(name, 0).fetch(100_000)]


def messages(broker: Broker, name: str) -> list[Message]:
    node = broker.id_node
    return [
        Message(name, position, json.loads(body), key, json.loads(headers or "{}"), id=node)
        for position, body, key, headers in broker.reader(name, 0).fetch(100_000)
    ]


def wait_for(broker: Broker, name: str, count: int, heard: Heard) -> None:
    """Wait until so many messages of a queue are readable."""
    until = time.monotonic() + WAIT_SECONDS
    while broker.catalog.backlog(name, 0).count < count:
        assert heard.wait(until - time.monotonic()) == name


def test_the_capabilities_say_so(broker: Broker) -> None:
    """The following tests are for brokers that declare the capability."""
    assert broker.capabilities.delay
    assert broker.capabilities.dedup


# --- delays -------------------------------------------------------------------------


@pytest.mark.usefixtures("only_wakeups")
def test_a_delayed_message_arrives_when_it_is_due(broker: Broker) -> None:
    """A listener is woken at the due time, not before. The position is that of the due time."""
    heard = Heard(broker)
    due = time.time() + 0.3
    sent = broker.send(Outgoing("q", b"1", "key", '{"h":"v"}', SendOptions(due)))
    assert bodies(broker, "q") == [] or time.time() >= due
    assert heard.wait() == "q"
    assert time.time() >= due
    (message,) = messages(broker, "q")
    assert time_of_position(message.position) >= due
    assert message.id == sent
    assert message.headers == {"h": "v", ID: sent}
    assert (message.key, message.body) == ("key", 1)
    heard.stop()


def test_the_backlog_shows_delayed_messages_by_themselves(broker: Broker) -> None:
    """They do not wait yet; when they have moved they do, and are no longer delayed."""
    broker.send_many([delayed("q", 1, 3600), delayed("q", 2, 7200), Outgoing("q", b"3")])
    backlog = broker.catalog.backlog("q", 0)
    assert (backlog.count, backlog.delayed) == (1, 2)
    broker.send(delayed("p", 1, 0.4))
    assert broker.catalog.names() == ["p", "q"]
    assert (broker.catalog.backlog("p", 0).count, broker.catalog.backlog("p", 0).delayed) == (0, 1)
    heard = Heard(broker)
    wait_for(broker, "p", 1, heard)
    assert (broker.catalog.backlog("p", 0).count, broker.catalog.backlog("p", 0).delayed) == (1, 0)
    assert broker.catalog.backlog("q", 0).delayed == 2
    heard.stop()


def test_a_delay_counts_by_the_clock_of_the_store(broker: Broker) -> None:
    """It is a due time below 0."""
    broker.send_many([Outgoing("q", b"1", terms=SendOptions(due=due)) for due in (-0.2, -3600.0)])
    heard = Heard(broker)
    wait_for(broker, "q", 1, heard)
    assert broker.catalog.backlog("q", 0).delayed == 1
    heard.stop()


def test_what_is_due_already_is_stored_at_once(broker: Broker) -> None:
    """A due time that is now or in the past needs no listener."""
    broker.send_many([delayed("q", 1, -10), delayed("q", 2, 0)])
    assert bodies(broker, "q") == [1, 2]


def test_delayed_messages_arrive_in_the_order_of_their_times(broker: Broker) -> None:
    """Whatever order they were sent in; those of one time in the order they were sent."""
    now = time.time()
    times = [0.9, 0.6, 0.8, 0.6, 0.7, 0.8, 0.6]
    broker.send_many(
        [
            Outgoing("q", json.dumps([after, number]).encode(), terms=SendOptions(now + after))
            for number, after in enumerate(times)
        ]
    )
    heard = Heard(broker)
    wait_for(broker, "q", len(times), heard)
    assert bodies(broker, "q") == sorted([after, number] for number, after in enumerate(times))
    heard.stop()


@pytest.mark.usefixtures("only_wakeups")
def test_an_earlier_one_from_elsewhere_is_not_slept_through(
    broker: Broker, connect: Callable[..., Broker]
) -> None:
    """Who sleeps until a far time is woken to set an earlier one."""
    broker.send(delayed("later", 1, 3600))
    heard = Heard(broker)
    began = time.monotonic()
    connect().send(delayed("q", 1, 0.1))
    assert heard.wait() == "q"
    assert time.monotonic() - began > 0.09
    heard.stop()


def test_of_many_listeners_one_moves_each_message(
    broker: Broker, connect: Callable[..., Broker]
) -> None:
    """All of them are woken; nothing is there twice."""
    heard = [Heard(connect()) for _ in range(4)]
    broker.send_many([delayed("q", number, 0.02 * (number % 10)) for number in range(200)])
    for each in heard:
        wait_for(broker, "q", 200, each)
    assert sorted(map(str, bodies(broker, "q"))) == sorted(map(str, range(200)))
    assert broker.catalog.backlog("q", 0).delayed == 0
    for each in heard:
        each.stop()


def test_another_app_does_not_move_them(broker: Broker, connect: Callable[..., Broker]) -> None:
    """Queues of the same name in other apps are other queues, and so are their delays."""
    other = connect("other")
    broker.send(delayed("q", "mine", 0.4))
    other.send(delayed("q", "theirs", 0.4))
    heard = Heard(other)
    wait_for(other, "q", 1, heard)
    assert bodies(other, "q") == ["theirs"]
    assert (bodies(broker, "q"), broker.catalog.backlog("q", 0).delayed) == ([], 1)
    heard.stop()


# --- deduplication ------------------------------------------------------------------


def test_the_second_of_a_key_is_not_stored(broker: Broker, connect: Callable[..., Broker]) -> None:
    """It gets the id of the first, from wherever it is sent."""
    first = broker.send(once("q", 1, "k"))
    assert connect().send(once("q", 2, "k")) == first
    assert bodies(broker, "q") == [1]
    assert [message.id for message in messages(broker, "q")] == [first]


def test_other_keys_queues_and_apps_have_nothing_to_do_with_it(
    broker: Broker, connect: Callable[..., Broker]
) -> None:
    """A key is one of its queue."""
    ids = {
        broker.send(once("q", 1, "k")),
        broker.send(once("q", 2, "K")),
        broker.send(once("p", 3, "k")),
        broker.send(Outgoing("q", b"4", "k")),
        connect("other").send(once("q", 5, "k")),
    }
    assert len(ids) == 5
    assert bodies(broker, "q") == [1, 2, 4]


def test_within_a_batch_too(broker: Broker) -> None:
    """The ids come in the order of the messages, the same for those of one key."""
    batch = [once("q", 1, "a"), once("q", 2, "b"), once("q", 3, "a"), Outgoing("q", b"4")]
    first, second, third, fourth = broker.send_many(batch)
    assert first == third
    assert len({first, second, fourth}) == 3
    assert bodies(broker, "q") == [1, 2, 4]
    assert [message.id for message in messages(broker, "q")] == [first, second, fourth]


def test_after_the_window_it_is_stored_again(broker: Broker) -> None:
    """The window is the one of the first, and begins with it."""
    first = broker.send(once("q", 1, "k", 0.2))
    until = time.monotonic() + WAIT_SECONDS
    while (again := broker.send(once("q", 2, "k", 300))) == first:
        assert time.monotonic() < until
    assert broker.send(once("q", 3, "k", 0.001)) == again
    assert bodies(broker, "q") == [1, 2]


def test_a_key_holds_for_a_delayed_message(broker: Broker) -> None:
    """The id is the one that it will have."""
    sent = broker.send(delayed("q", 1, 0.1, "k"))
    assert broker.send(once("q", 2, "k")) == sent
    assert broker.send(delayed("q", 3, 5000, "k")) == sent
    heard = Heard(broker)
    wait_for(broker, "q", 1, heard)
    assert [message.id for message in messages(broker, "q")] == [sent]
    assert broker.send(once("q", 4, "k")) == sent
    assert broker.catalog.backlog("q", 0).delayed == 0
    heard.stop()


# --- as operators list and delete them -----------------------------------------------------


def send(broker: Broker, body: bytes, seconds: float, queue: str = "q") -> str:
    terms = SendOptions(due=time.time() + seconds)
    return broker.send(Outgoing(queue, body, "key", json.dumps({"a": "b"}), terms))


def test_the_next_due_comes_first(connect: Callable[..., Broker]) -> None:
    """Of one queue and one app, with ids, up to a limit."""
    broker = connect()
    late, soon = send(broker, b"2", 7200.0), send(broker, b"1", 3600.0)
    other = send(broker, b"3", 60.0, "other")
    send(connect("another"), b"4", 60.0)
    found = broker.delayed.find("q", 10)
    assert [(each.id, each.key, each.body) for each in found] == [
        (soon, "key", b"1"),
        (late, "key", b"2"),
    ]
    assert found[0].due < found[1].due
    assert json.loads(found[0].headers or "")["a"] == "b"
    assert [each.id for each in broker.delayed.find("q", 1)] == [soon]
    assert [each.id for each in broker.delayed.find("q", 9, [late, other, "%", "_"])] == [late]
    assert broker.delayed.find("q", 9, []) == []
    assert sorted(broker.delayed.numbers("q")) == sorted(each.number for each in found)
    assert broker.delayed.find("nothing", 9) == []
    assert broker.delayed.numbers("nothing") == []


def test_a_deleted_message_never_comes(connect: Callable[..., Broker]) -> None:
    """It is counted no more; deleting it again, or in another queue, deletes nothing."""
    broker = connect()
    send(broker, b"1", 3600.0)
    (number,) = broker.delayed.numbers("q")
    assert broker.delayed.discard("other", [number]) == set()
    assert connect("another").delayed.discard("q", [number]) == set()
    assert broker.delayed.discard("q", [number, 10**6]) == {number}
    assert broker.delayed.discard("q", [number]) == set()
    assert broker.catalog.backlog("q", 0).delayed == 0


def test_each_message_is_moved_or_deleted(connect: Callable[..., Broker]) -> None:
    """While listeners move those that are due, and operators delete them."""
    for seconds in (0.75, 3.0, 12.0):  # a slow machine moves all before the first is deleted
        moved, deleted = moved_and_deleted(connect(), connect(), connect(), seconds)
        if moved and deleted:
            break
    assert moved
    assert deleted


def moved_and_deleted(
    broker: Broker, mover: Broker, other: Broker, seconds: float
) -> tuple[list[str], list[str]]:
    """Return the ids of messages that are due one after the other within some seconds."""
    queue = f"q-{seconds}"
    ids = {
        send(broker, str(each).encode(), 0.2 + seconds * each / 150, queue) for each in range(150)
    }
    stops = [each.listen(lambda names: None) for each in (mover, other)]
    by_number = {each.number: each.id for each in broker.delayed.find(queue, 1000)}
    deleted: set[int] = set()
    for number in [*by_number][::-2]:  # the next due may be moved before the first is deleted
        deleted |= broker.delayed.discard(queue, [number])
    until = time.monotonic() + seconds + WAIT_SECONDS
    while broker.delayed.numbers(queue):
        assert time.monotonic() < until, "the last due message was not moved"
        time.sleep(0.01)
    for stop in stops:
        stop()
    moved = [json.loads(row[3] or "{}")[ID] for row in broker.reader(queue, 0).fetch(1000)]
    gone = [by_number[each] for each in deleted]
    assert sorted([*moved, *gone]) == sorted(ids)
    return moved, gone
