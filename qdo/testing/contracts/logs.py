"""The contract of a broker that is a log, with positions that are times."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable

import pytest

from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.catalog import NO_BACKLOG, Backlog
from qdo.errors import MessageTooLargeError, QueueNameError, UsageError
from qdo.positions import message_id, position_now, time_of_position
from qdo.testing.contracts.fixtures import WAIT_SECONDS, dead_letter

ODD_NAMES = [
    "a b",
    "Ünïcode-✓",
    "日本語",
    "'; DROP TABLE queues; --",
    "%",
    "_",
    'say "a\\b"',
    ".hidden",
    "x" * 200,
]
BAD_NAMES = ["", ".", "..", "a/b", "tab\t", "nul\0", "zookeeper", "x" * 201, "\ud800"]


def bodies(broker: Broker, name: str, after: int = 0, limit: int = 100_000) -> list[bytes]:
    return [row[1] for row in broker.reader(name, after).fetch(limit)]


def positions(broker: Broker, name: str) -> list[int]:
    return [row[0] for row in broker.reader(name, 0).fetch(100_000)]


def outgoing(name: str, numbers: Iterable[int]) -> list[Outgoing]:
    return [Outgoing(name, b"%d" % number) for number in numbers]


# --- sending and fetching -----------------------------------------------------------


def test_positions_grow_and_are_times(broker: Broker) -> None:
    """They are unique, strictly growing, and close to the clock."""
    broker.send_many([Outgoing(f"q{number % 3}", b"1") for number in range(300)])
    broker.send(Outgoing("q0", b"1"))
    found = [position for name in ("q0", "q1", "q2") for position in positions(broker, name)]
    assert len(set(found)) == 301
    for name in ("q0", "q1", "q2"):
        assert positions(broker, name) == sorted(positions(broker, name))
    assert abs(time_of_position(max(found)) - time.time()) < 60


def test_ids_are_unique_and_made_from_positions(broker: Broker) -> None:
    """The id from send() can be derived from a fetched position."""
    ids = [broker.send(Outgoing("q", b"1")), *broker.send_many(outgoing("q", range(20)))]
    assert ids == [message_id(position, broker.id_node) for position in positions(broker, "q")]
    assert len({uuid.UUID(made) for made in ids}) == 21


def test_the_node_of_ids_belongs_to_the_broker(
    broker: Broker, connect: Callable[..., Broker]
) -> None:
    """Every process makes the same ids from the same positions."""
    assert connect().id_node == broker.id_node
    assert 0 < broker.id_node < 2**48


def test_a_reader_goes_on_where_it_stopped(broker: Broker) -> None:
    """Each fetch continues after the last one; the tip yields nothing until new messages come."""
    broker.send_many(outgoing("q", range(10)))
    reader = broker.reader("q", 0)
    assert [len(reader.fetch(4)) for _ in range(4)] == [4, 4, 2, 0]
    broker.send(Outgoing("q", b"new"))
    assert [row[1] for row in reader.fetch(4)] == [b"new"]


def test_a_reader_resumes_right_behind_a_position(broker: Broker) -> None:
    """After the position of the nth message comes message n+1."""
    broker.send_many(outgoing("q", range(10)))
    for done, after in enumerate([0, *positions(broker, "q")]):
        assert bodies(broker, "q", after) == [b"%d" % number for number in range(done, 10)]


def test_a_reader_may_wait_for_a_queue_that_does_not_exist_yet(broker: Broker) -> None:
    """It returns nothing until the first message, then that."""
    reader = broker.reader("later", 0)
    assert list(reader.fetch(10)) == []
    broker.send(Outgoing("later", b"1"))
    assert [row[1] for row in reader.fetch(10)] == [b"1"]


def test_a_batch_with_a_bad_message_stores_nothing(broker: Broker) -> None:
    """All or none: the good messages before and behind the bad one are not stored either."""
    for bad, error in (
        (Outgoing("a/b", b"1"), QueueNameError),
        (Outgoing("q", b"1", key="\ud800"), UsageError),
        (Outgoing("q", b"1", headers="\udfff"), UsageError),
    ):
        with pytest.raises(error):
            broker.send_many([Outgoing("q", b"1"), bad, Outgoing("q", b"2")])
    assert broker.catalog.names() == []
    assert bodies(broker, "q") == []


def test_a_fetch_of_large_bodies_is_cut_but_never_empty(broker: Broker) -> None:
    """However many rows are asked for, memory stays bounded, and all come in the end."""
    broker.send_many([Outgoing("q", b"%d" % number + b"x" * 9_000_000) for number in range(5)])
    broker.send_many(outgoing("q", range(5, 20)))
    reader = broker.reader("q", 0)
    fetched: list[list[bytes]] = []
    while rows := reader.fetch(1000):
        fetched.append([row[1].rstrip(b"x") for row in rows])
    assert len(fetched) > 1
    assert [body for part in fetched for body in part] == [b"%d" % number for number in range(20)]


def test_a_body_beyond_the_limit_is_refused(broker: Broker) -> None:
    """The error names the queue, the size and the limit, which itself is allowed."""
    limit = broker.capabilities.max_body_bytes
    with pytest.raises(MessageTooLargeError, match=f"queue 'q'.*{limit + 1}"):
        broker.send(Outgoing("q", bytes(limit + 1)))
    broker.send(Outgoing("q", bytes(limit)))
    (body,) = bodies(broker, "q")
    assert len(body) == limit


# --- queues and apps ----------------------------------------------------------------


def test_odd_queue_names_work(broker: Broker) -> None:
    """Whatever is a valid name is kept to the letter."""
    for name in ODD_NAMES:
        broker.send(Outgoing(name, name.encode()))
    assert sorted(broker.catalog.names()) == sorted(ODD_NAMES)
    for name in ODD_NAMES:
        assert bodies(broker, name) == [name.encode()]
        assert broker.catalog.backlog(name, 0).count == 1


def test_names_that_no_znode_can_have_are_refused(broker: Broker) -> None:
    """A queue that could never be assigned must not take messages."""
    for name in BAD_NAMES:
        with pytest.raises(QueueNameError):
            broker.send(Outgoing(name, b"1"))
    assert broker.catalog.names() == []


def test_apps_do_not_see_each_others_queues(connect: Callable[..., Broker]) -> None:
    """The same queue name in two apps is two queues."""
    one, two = connect("one"), connect("two")
    one.send(Outgoing("q", b"1"))
    two.send(Outgoing("q", b"2"))
    two.send(Outgoing("r", b"3"))
    assert (one.catalog.names(), two.catalog.names()) == (["q"], ["q", "r"])
    assert (bodies(one, "q"), bodies(two, "q")) == ([b"1"], [b"2"])
    two.dead_letters.store(dead_letter("q", 7))
    assert one.dead_letters.records() == []


def test_what_is_sent_is_seen_by_others_and_survives_closing(
    broker: Broker, connect: Callable[..., Broker]
) -> None:
    """Another connection reads it at once, a later one after everybody has left."""
    broker.send(Outgoing("q", b"1"))
    other = connect()
    assert bodies(other, "q") == [b"1"]
    broker.close()
    other.close()
    assert bodies(connect(), "q") == [b"1"]


# --- backlog ------------------------------------------------------------------------


def test_the_backlog_counts_what_waits(broker: Broker) -> None:
    """Count, oldest and head follow the position asked about."""
    broker.send_many(outgoing("q", range(10)))
    broker.send_many(outgoing("other", range(5)))
    known = positions(broker, "q")
    everything = broker.catalog.backlog("q", 0)
    assert (everything.count, everything.oldest, everything.head) == (10, known[0], known[-1])
    some = broker.catalog.backlog("q", known[6])
    assert (some.count, some.oldest, some.head) == (3, known[7], known[-1])
    none = broker.catalog.backlog("q", known[-1])
    assert (none.count, none.oldest, none.head) == (0, None, known[-1])


def test_the_backlog_of_a_position_between_two_messages(broker: Broker) -> None:
    """An operator may seek to any time."""
    broker.send_many(outgoing("q", range(4)))
    known = positions(broker, "q")
    assert broker.catalog.backlog("q", known[0] - 1).count == 4
    assert broker.catalog.backlog("q", known[3] + 10**9).count == 0


def test_a_queue_that_does_not_exist_has_no_backlog(broker: Broker) -> None:
    """Nothing waits, and nothing was ever sent."""
    found = broker.catalog.backlog("nowhere", 0)
    assert (found.count, found.oldest, found.head) == (0, None, 0)


def test_the_backlogs_of_more_queues_than_one_query_names(broker: Broker) -> None:
    """Each is that behind its own position, whatever its name."""
    plain = [f"tenant-{number}" for number in range(1001)]
    broker.send_many(
        [Outgoing(name, b"1") for name in plain]
        + [each for name in ODD_NAMES for each in outgoing(name, range(3))]
    )
    known = {name: positions(broker, name) for name in (*plain, *ODD_NAMES)}
    after = dict.fromkeys(plain, 0) | {name: known[name][0] for name in ODD_NAMES}
    found = broker.catalog.backlogs({**after, "nowhere": 0})
    expected = {name: Backlog(1, known[name][0], known[name][0]) for name in plain}
    expected |= {name: Backlog(2, known[name][1], known[name][2]) for name in ODD_NAMES}
    assert found == {**expected, "nowhere": NO_BACKLOG}


# --- retention ----------------------------------------------------------------------


def test_done_messages_are_retired(broker: Broker) -> None:
    """Messages up to `last` are deleted, later ones stay, and the count is that of deleted ones."""
    broker.send_many(outgoing("q", range(2500)))
    known = positions(broker, "q")
    assert broker.trim("q", known[2399], older_than=-60) == 2400
    assert bodies(broker, "q") == [b"%d" % number for number in range(2400, 2500)]
    assert broker.catalog.backlog("q", 0).count == 100
    assert broker.trim("q", known[2399], older_than=-60) == 0


def test_young_messages_are_not_retired(broker: Broker) -> None:
    """Done or not, a message stays for the retention time, for replays."""
    broker.send_many(outgoing("q", range(10)))
    assert broker.trim("q", position_now(), older_than=3600) == 0
    assert len(bodies(broker, "q")) == 10


def test_messages_behind_last_are_never_retired(broker: Broker) -> None:
    """However old they are, they were not processed."""
    broker.send_many(outgoing("q", range(10)))
    assert broker.trim("q", 0, older_than=-60) == 0
    assert len(bodies(broker, "q")) == 10


def test_positions_go_on_growing_after_everything_was_retired(broker: Broker) -> None:
    """An empty queue remembers its head: no position is given twice."""
    broker.send_many(outgoing("q", range(10)))
    head = broker.catalog.backlog("q", 0).head
    assert broker.trim("q", head, older_than=-60) == 10
    assert broker.catalog.backlog("q", 0).head == head
    broker.send(Outgoing("q", b"new"))
    assert positions(broker, "q")[0] > head
    assert broker.catalog.backlog("q", head).count == 1


def test_retiring_an_unknown_queue_makes_none(broker: Broker) -> None:
    """It is a question, not a message."""
    assert broker.trim("nowhere", position_now(), older_than=0) == 0
    assert broker.catalog.names() == []


# --- dead letters -------------------------------------------------------------------


def test_burying_twice_keeps_the_first(broker: Broker) -> None:
    """A worker that could not record its progress buries again after a handover."""
    broker.dead_letters.store(dead_letter("q", 7, error="first"))
    broker.dead_letters.store(dead_letter("q", 7, error="second"))
    assert [found.error for found in broker.dead_letters.records()] == ["first"]


def test_a_dead_letter_gets_the_time_when_none_is_given(broker: Broker) -> None:
    """dead_at 0 means now; an error text may hold anything Python can print."""
    broker.dead_letters.store(dead_letter(error="bad \ud800", dead_at=0.0))
    (found,) = broker.dead_letters.records()
    assert abs(found.dead_at - time.time()) < 60
    assert found.error == "bad \\ud800"


def test_dead_letters_survive_retirement(broker: Broker) -> None:
    """They are kept apart from the queue."""
    broker.send(Outgoing("q", b"1"))
    (position,) = positions(broker, "q")
    broker.dead_letters.store(dead_letter("q", position))
    assert broker.trim("q", position, older_than=-60) == 1
    assert len(broker.dead_letters.records("q")) == 1


# --- wake-up ------------------------------------------------------------------------


class Woken:
    """Collects the names a listener is woken for."""

    def __init__(self, broker: Broker) -> None:
        self._names: queue.Queue[str] = queue.Queue()
        self.stop = broker.listen(self._wake)

    def _wake(self, names: Iterable[str]) -> None:
        for name in names:
            self._names.put(name)

    def wait_for(self, *expected: str) -> None:
        missing = set(expected)
        deadline = time.monotonic() + WAIT_SECONDS
        while missing:
            missing.discard(self._names.get(timeout=max(0.01, deadline - time.monotonic())))

    def names(self) -> list[str]:
        found = []
        while not self._names.empty():
            found.append(self._names.get())
        return found


def test_a_listener_is_woken_by_another_connection(
    broker: Broker, connect: Callable[..., Broker]
) -> None:
    """It gets the names of queues, old and new, and can fetch at once."""
    broker.send(Outgoing("old", b"1"))
    woken = Woken(broker)
    sender = connect()
    sender.send(Outgoing("old", b"2"))
    woken.wait_for("old")
    sender.send_many([Outgoing("new", b"1"), Outgoing("newer", b"1")])
    woken.wait_for("new", "newer")
    assert bodies(broker, "new") == [b"1"]
    woken.stop()


def test_every_message_is_announced_after_it_is_readable(broker: Broker) -> None:
    """Also to the process that sends. No message stays behind unannounced, however the sends and
    the looks fall together."""
    reader = broker.reader("q", 0)
    arrived = threading.Event()
    seen: list[bytes] = []

    def wake(names: Iterable[str]) -> None:
        if "q" in set(names):
            seen.extend(row[1] for row in reader.fetch(10_000))
            if len(seen) >= 300:
                arrived.set()

    stop = broker.listen(wake)
    for number in range(300):
        broker.send(Outgoing("q", b"%d" % number))
    assert arrived.wait(WAIT_SECONDS)
    stop()
    assert seen == [b"%d" % number for number in range(300)]


def test_a_listener_hears_nothing_of_other_apps(connect: Callable[..., Broker]) -> None:
    """Wake-ups carry only the names of the own app."""
    woken = Woken(connect("one"))
    connect("two").send(Outgoing("theirs", b"1"))
    connect("one").send(Outgoing("ours", b"1"))
    woken.wait_for("ours")
    woken.stop()
    assert "theirs" not in woken.names()


def test_a_stopped_listener_is_not_called(broker: Broker) -> None:
    """After stop() has returned no wake-up follows; stopping twice is allowed."""
    woken = Woken(broker)
    witness = Woken(broker)
    woken.stop()
    woken.stop()
    broker.send(Outgoing("q", b"1"))
    witness.wait_for("q")
    witness.stop()
    assert woken.names() == []


# --- many at once, and the end ------------------------------------------------------
