"""The contract of a broker with a store for dead letters."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterable
from typing import Any

from qdo.brokers.base import Broker, Outgoing, Row
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.testing.contracts.fixtures import dead_letter

Rows = Callable[[Broker, str], list[Row]]
START = 1_700_000_000.0


def letter(queue: str, number: int, **changed: Any) -> DeadLetterRecord:
    """Return a letter whose position its error, body and time tell."""
    own = {"error": f"ValueError: Größe {number}", "body": b'{"n":%d}' % number}
    return dead_letter(queue, number, **{**own, "dead_at": START + number, **changed})


def buried(broker: Broker, *letters: DeadLetterRecord) -> None:
    for each in letters:
        broker.dead_letters.store(each)


def places(broker: Broker, **chosen: Any) -> list[tuple[str, int]]:
    return [(each.queue, each.position) for each in broker.dead_letters.find(**chosen)]


def test_prune_deletes_the_oldest(broker: Broker, connect: Callable[..., Broker]) -> None:
    """By number or age, of one queue of this app."""
    letters = [letter("a", number) for number in (3, 1, 5, 2, 4)]
    buried(broker, *letters, letter("b", 1))
    buried(connect("other"), letter("a", 1))
    prune = broker.dead_letters.prune
    assert [prune("a", keep=5), prune("a", before=START), prune("missing", keep=1)] == [0, 0, 0]
    assert prune("a", keep=4) == 1
    assert prune("a", before=START + 4) == 2
    assert places(broker) == [("b", 1), ("a", 4), ("a", 5)]
    assert prune("a", keep=1) == 1
    assert places(broker) == [("b", 1), ("a", 5)]
    assert places(connect("other")) == [("a", 1)]


def test_counts(broker: Broker, connect: Callable[..., Broker]) -> None:
    """By queue, of those that have any, of this app."""
    broker.send(Outgoing("healthy", b"1"))
    buried(broker, letter("a", 1), letter("a", 2), letter("b", 1))
    buried(connect("other"), letter("a", 9))
    assert dict(broker.dead_letters.counts()) == {"a": 2, "b": 1}


def test_entries_are_all_but_body_and_traceback(broker: Broker) -> None:
    """With the size of the body; the rest is had one by one."""
    stored = letter("a", 1, body=b"x" * 1000)
    buried(broker, stored)
    (entry,) = broker.dead_letters.find()
    (whole,) = broker.dead_letters.records()
    for name in type(entry).__slots__:
        if name != "body_bytes":
            assert getattr(entry, name) == getattr(whole, name)
    assert entry.body_bytes == 1000
    assert broker.dead_letters.get("a", 1) == whole == stored
    assert broker.dead_letters.get("a", 2) is None
    assert broker.dead_letters.get("b", 1) is None


def test_finding(broker: Broker) -> None:
    """By queue, by text of the error in any case of any alphabet, and by time."""
    buried(broker, letter("b", 3), letter("a", 2), letter("a", 1), letter("a", 4, error="100%"))
    assert places(broker) == [("a", 1), ("a", 2), ("b", 3), ("a", 4)]
    assert places(broker, queue="a") == [("a", 1), ("a", 2), ("a", 4)]
    assert places(broker, queue="a*") == []
    assert places(broker, error="GRÖSSE") == [("a", 1), ("a", 2), ("b", 3)]
    assert places(broker, error="größe 2") == [("a", 2)]
    assert places(broker, error="%") == [("a", 4)]
    assert places(broker, since=START + 2, until=START + 3) == [("a", 2), ("b", 3)]
    assert places(broker, queue="b", since=START + 4) == []


def test_a_retried_letter_is_the_newest_message_and_no_letter(broker: Broker, rows: Rows) -> None:
    """Body, key and headers stay; the headers show the original message and the retry count."""
    broker.send(Outgoing("a", b"0"))
    buried(broker, letter("a", 1), letter("a", 2))
    (position,) = broker.dead_letters.retry([("a", 2)])
    assert position is not None
    _, row = rows(broker, "a")
    assert broker.positions.identity(row.position) == broker.positions.identity(position)
    assert (bytes(row.body), row.key) == (b'{"n":2}', "k")
    first = broker.positions.message_id(2, broker.id_node)
    assert json.loads(row.headers or "") == {"a": "b", "qdo-id": first, "qdo-retried": "1"}
    assert places(broker) == [("a", 1)]
    assert broker.catalog.backlog("a", 0).count == 2


def test_the_first_id_stays_whenever_it_is_retried(broker: Broker, rows: Rows) -> None:
    """Also where the message had another id than its position's, as delayed ones have."""
    buried(broker, letter("a", 1, headers='{"qdo-id":"first"}'))
    (position,) = broker.dead_letters.retry([("a", 1)])
    assert position is not None
    (row,) = rows(broker, "a")
    buried(broker, letter("a", position, headers=row.headers))
    broker.dead_letters.retry([("a", position)])
    again = rows(broker, "a")[-1]
    assert json.loads(again.headers or "") == {"qdo-id": "first", "qdo-retried": "2"}


def test_headers_that_cannot_be_decoded_are_kept(broker: Broker, rows: Rows) -> None:
    """They are evidence."""
    buried(broker, letter("a", 1, headers="{broken"))
    broker.dead_letters.retry([("a", 1)])
    (row,) = rows(broker, "a")
    assert row.headers == "{broken"


def test_retrying_wakes_listeners(broker: Broker, connect: Callable[..., Broker]) -> None:
    """It is sent like any other message; a mailbox does not notify anyone of messages."""
    if not broker.capabilities.peek:
        return
    names: queue.Queue[str] = queue.Queue()

    def wake(woken: Iterable[str]) -> None:
        for each in woken:
            names.put(each)

    stop = connect().listen(wake)
    buried(broker, letter("a", 1))
    broker.dead_letters.retry([("a", 1)])
    assert names.get(timeout=20) == "a"
    stop()


def test_retrying_many_keeps_the_given_order(broker: Broker, rows: Rows) -> None:
    """None stands for those that do not exist, also for the second of the same."""
    buried(broker, letter("a", 1), letter("b", 2), letter("a", 3))
    wanted = [("a", 3), ("nowhere", 1), ("a", 2), ("a", 1), ("a", 3), ("b", 2)]
    moved = broker.dead_letters.retry(wanted)
    assert [each is None for each in moved] == [False, True, True, False, True, False]
    assert [json.loads(row.body) for row in rows(broker, "a")] == [{"n": 3}, {"n": 1}]
    assert places(broker) == []
    assert broker.catalog.names() == ["a", "b"]
    assert broker.dead_letters.retry([]) == []


def test_discarding(broker: Broker, rows: Rows) -> None:
    """They are deleted; False for missing ones."""
    buried(broker, letter("a", 1), letter("a", 2))
    assert broker.dead_letters.discard([("a", 1), ("a", 1), ("b", 2)]) == [True, False, False]
    assert places(broker) == [("a", 2)]
    assert rows(broker, "a") == []


def test_a_queue_is_known_by_its_letters_alone(broker: Broker) -> None:
    """For stores that mix dead letters and messages; in SQS they are in a separate queue."""
    buried(broker, letter("a", 1))
    assert broker.catalog.names() == (["a"] if broker.capabilities.peek else [])


def test_letters_of_other_apps_cannot_be_touched(
    broker: Broker, connect: Callable[..., Broker]
) -> None:
    """Queues of the same name in other apps are other queues."""
    buried(broker, letter("a", 1))
    other = connect("other")
    assert other.dead_letters.retry([("a", 1)]) == [None]
    assert other.dead_letters.discard([("a", 1)]) == [False]
    assert other.dead_letters.get("a", 1) is None
    assert places(broker) == [("a", 1)]
