"""The delayed messages of a broker as operators list and delete them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.encoding import ID
from tests.support.brokers import opening
from tests.support.processes import wait_until


@pytest.fixture(params=["embedded", "postgresql"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Open further connections to the broker, as other processes would."""
    with opening(request.param, tmp_path, request) as connect:
        yield connect


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
    assert broker.delayed.find("nothing", 9) == broker.delayed.numbers("nothing") == []


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
    broker, mover, other = connect(), connect(), connect()
    ids = {send(broker, str(each).encode(), 0.2 + 0.005 * each) for each in range(150)}
    stops = [each.listen(lambda names: None) for each in (mover, other)]
    by_number = {each.number: each.id for each in broker.delayed.find("q", 1000)}
    deleted: set[int] = set()
    for number in [*by_number][::2]:
        deleted |= broker.delayed.discard("q", [number])
    wait_until(lambda: not broker.delayed.numbers("q"), "the last due message")
    for stop in stops:
        stop()
    moved = [json.loads(row[3] or "{}")[ID] for row in broker.reader("q", 0).fetch(1000)]
    assert deleted
    assert sorted([*moved, *(by_number[each] for each in deleted)]) == sorted(ids)
