"""Stores of requests: steps wake the request that waits for them, and end and go with it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from qdo.brokers.base import Broker
from qdo.brokers.request_store import RequestStore
from qdo.brokers.requests import IN_STEPS, OVER, PAUSED, RUNNING, WAITING, Take
from qdo.errors import RequestNotFoundError, RequestStateError
from qdo.ops.requests import retry, state_text
from qdo.positions import position_now
from qdo.testing.memory_broker import MemoryBroker
from tests.contract.requests.test_stores import (
    CANCEL,
    FAR,
    MESSAGE,
    RESUME,
    ask,
    found,
    ids,
    new,
    take,
    told,
)
from tests.support.processes import wait_until


def parent(broker: Broker, *steps: str, suspends: bool = True, **options: Any) -> Take:
    """Store a request that runs, or waits for its steps, which any worker may take."""
    ask(broker, "a", pool="whole", **options)
    (whole,) = take(broker, pool="whole")
    ask(broker, *steps, parent="a")
    if suspends:
        assert broker.requests.note(whole.take, IN_STEPS, "in p")
    return whole.take


def end(broker: Broker, *names: str, outcome: str = "done") -> None:
    taken = take(broker, len(names))
    assert ids(taken) == [*names]
    for each in taken:
        assert broker.requests.end(each.take, outcome, (b"1", None), error="E")


def states(broker: Broker) -> dict[str, int]:
    return {each.id: each.state for each in broker.requests.records()}


def test_the_last_step_wakes_its_request(broker: Broker) -> None:
    """It keeps its age, and its attempts count from 1; a repeated end changes nothing."""
    whole = parent(broker, "s", "t")
    record = found(broker)
    assert (record.state, record.take, record.note) == (PAUSED, Take("a", "", 1), "in p")
    assert (state_text(record), record.asks) == ("in steps", False)
    assert broker.requests.owners() == []
    assert not broker.requests.take("w", "whole", 9, []).requests
    assert not broker.requests.end(whole, "done")
    end(broker, "s", outcome="failed")
    assert found(broker).state == PAUSED
    (last,) = take(broker)
    for _ in range(2):
        assert broker.requests.end(last.take, "done", (b"2", None))
        assert found(broker).state == WAITING
    (again,) = take(broker, pool="whole")
    assert (again.take, again.failed) == (Take("a", "w", 2), 0)
    assert not broker.requests.note(whole, IN_STEPS, None)
    own, *steps = broker.requests.records(of="a")
    assert (own.id, own.parent, own.content[0]) == ("a", None, b"")
    assert [(each.id, each.parent, each.outcome, each.result) for each in steps] == [
        ("s", "a", "failed", (b"1", None)),
        ("t", "a", "done", (b"2", None)),
    ]


def test_steps_that_end_first_wake_their_request_at_once(broker: Broker) -> None:
    """Also if it never had any: its job may have died between two statements."""
    whole = parent(broker, "s", suspends=False)
    end(broker, "s")
    assert found(broker).state == RUNNING
    assert broker.requests.note(whole, IN_STEPS, None)
    assert found(broker).state == WAITING


def test_ends_at_the_same_time_wake_their_request(connect: Callable[..., Broker]) -> None:
    """The ends of eight steps, and the suspension, over connections of their own."""
    broker = connect()
    names = [f"s{number}" for number in range(8)]
    whole = parent(broker, *names, suspends=False)
    taken = take(broker)
    acts = [lambda: broker.requests.note(whole, IN_STEPS, None)] + [
        lambda each=each: connect().requests.end(each.take, "done", (b"1", None)) for each in taken
    ]
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states(broker) == {"a": WAITING} | dict.fromkeys(names, OVER)


def test_an_end_tells_listeners_of_its_request(broker: Broker) -> None:
    woken = threading.Event()
    parent(broker, "s")
    (step,) = take(broker)
    stop = broker.requests.listen(woken.set)
    woken.clear()
    broker.requests.end(step.take, "done", (b"1", None), messages=[MESSAGE])
    wait_until(woken.is_set, "the end has told")
    stop()
    assert told(broker) == [b"over"]


def test_a_question_ends_with_its_answer(broker: Broker) -> None:
    """No worker takes it, and no mark cancels or answers it."""
    ask(broker, "q", paused=True)
    assert take(broker) == broker.requests.owners() == []
    assert broker.requests.due("") == {}
    record = found(broker, "q")
    assert (record.state, record.asks) == (PAUSED, True)
    assert not broker.requests.mark("q", CANCEL)
    assert not broker.requests.mark("q", RESUME)
    assert broker.requests.end(record.take, "done", (b"7", None), messages=[MESSAGE])
    assert (found(broker, "q").result, told(broker)) == ((b"7", None), [b"over"])
    ask(broker, "r", paused=True)
    assert broker.requests.end(found(broker, "r").take, "cancelled", error="no")


def late(broker: Broker) -> list[str]:
    return sorted(each.id for each in broker.requests.records(late=True))


def test_late_requests_and_their_steps_are_overdue(broker: Broker) -> None:
    """A request with steps is not, nor a step that was asked for after its deadline."""
    store = broker.requests
    ask(broker, "past", "marked", deadline=5.0)
    ask(broker, "far", deadline=FAR, paused=True)
    ask(broker, "soon", deadline=-0.001, paused=True)
    ask(broker, "none", "over", deadline=5.0)
    assert store.end(found(broker, "over").take, "cancelled")
    assert store.end(found(broker, "none").take, "cancelled")
    (*_, marked) = store.take("w", "p", 2, []).requests
    assert store.mark(marked.take.id, CANCEL)
    wait_until(lambda: late(broker) == ["past", "soon"], "a moment has passed")
    parent(broker, "s", "t")
    ask(broker, "u", parent="s")
    for name in ("past", "soon"):
        store.mark(name, CANCEL) or store.end(found(broker, name).take, "cancelled")
    assert late(broker) == []
    assert store.mark("a", CANCEL)  # its deadline is now
    assert late(broker) == ["t", "u"]
    assert found(broker).mark is None
    ask(broker, "undo", parent="a")
    assert late(broker) == ["t", "u"]
    assert store.mark("s", CANCEL)
    assert found(broker, "s").deadline > 0


RETRIED = [
    (None, "ars1tv2"),
    ("v", "ars1tu23"),
    ("t", "ars1"),
    ("r", "a"),
]


@pytest.mark.parametrize(("since", "left"), RETRIED, ids=str)
def test_a_retry_forgets_steps(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, since: str | None, left: str
) -> None:
    """The last ones unless they are done, at any depth, or those from a step on."""
    clock = itertools.count(position_now(), 10_000_000)
    if isinstance(broker, MemoryBroker):
        monkeypatch.setattr(broker.writer, "clock", clock.__next__)
    ask(broker, "a", "another", pool="whole")
    whole, _ = take(broker, pool="whole")
    for names, above, outcomes in (
        ("r", "a", ["done"]),
        ("s", "a", ["failed"]),
        ("1", "s", ["done"]),
        ("tuv", "a", ["done", "failed", "done"]),
        ("23", "u", ["done", "skipped"]),
    ):
        ask(broker, *names, parent=above)
        for name, outcome in zip(names, outcomes, strict=True):
            end(broker, name, outcome=outcome)
    assert broker.requests.note(whole.take, IN_STEPS, None)
    (whole,) = take(broker, pool="whole")[:1]
    assert broker.requests.end(whole.take, "failed", error="E", failed=1)
    with pytest.raises(RequestStateError):
        retry(broker.requests, "s")
    assert broker.requests.counts()["whole"].failed == 1
    assert "p" not in broker.requests.counts()
    assert ids(broker.requests.records(states=(OVER,), outcome="failed")) == ["a"]
    assert broker.requests.expire(["s"]) == 0
    retry(broker.requests, "a", since)
    assert sorted(set(states(broker)) - {"another"}) == sorted(left)
    (again,) = take(broker, pool="whole")
    assert again.take.number == 4
    ask(broker, "open", parent="a")
    assert broker.requests.end(again.take, "failed", error="E")
    with pytest.raises(RequestStateError):
        retry(broker.requests, "a")
    with pytest.raises(RequestNotFoundError):
        retry(broker.requests, "another", "open")


DELETED: dict[str, tuple[str, Callable[[RequestStore], object]]] = {
    "expired": ("cancelled", lambda store: store.expire()),
    "asked for again": ("failed", lambda store: store.ask([new("a", pool="whole")])),
    "discarded": ("failed", lambda store: store.expire(["a"])),
}


@pytest.mark.parametrize(("outcome", "delete"), DELETED.values(), ids=DELETED)
def test_steps_are_deleted_with_their_request(
    broker: Broker, outcome: str, delete: Callable[[RequestStore], object]
) -> None:
    """Not before, whatever their own time."""
    store = broker.requests
    whole = parent(broker, "s", "t", suspends=False, keep_seconds=0.0)
    ask(broker, "u", parent="s", keep_seconds=0.0)
    end(broker, "s", "t", "u")
    assert store.expire() == 0
    assert len(store.records(of="a")) == 3
    assert store.end(whole, outcome, error="E")
    delete(store)
    assert states(broker) in ({}, {"a": WAITING})
    assert [each.id for each in store.records(of="s")] == []
