"""Retrying many dead letters: those that the broker refuses stay, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from qdo.broker_errors import PostgresqlBusyError, PostgresqlUnreachableError
from qdo.brokers.base import Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.requests import NewRequest
from qdo.errors import UsageError
from qdo.ops import dead_letters as ops
from qdo.testing.memory_broker import MemoryBroker, MemoryStore


@pytest.fixture
def broker() -> MemoryBroker:
    """With 250 dead letters of three queues, of which each has every third."""
    broker = MemoryBroker(MemoryStore(), "shop")
    for number in range(250):
        queue = f"q{number % 3}"
        broker.send(Outgoing(queue, b"%d" % number))
        position = broker.catalog.head(queue)
        letter = (queue, position, b"%d" % number, None, None)
        broker.dead_letters.store(DeadLetterRecord(*letter, "error", "", 1, "worker", 1))
    return broker


@pytest.mark.parametrize(
    ("error", "stay"),
    [
        (UsageError(reason="no"), [31]),
        (PostgresqlBusyError(server="db", reason="a lock"), [*range(31, 250, 3)]),
        (PostgresqlUnreachableError(server="db", reason="it is down"), None),
    ],
    ids=["refused", "busy", "unreachable"],
)
def test_one_that_fails_stops_no_other(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, error: Exception, stay: list[int] | None
) -> None:
    letters = ops.find(broker, ops.Filter(), 2e9)
    failing = letters[31].entry
    real = broker.dead_letters.retry

    def retry(keys: Sequence[tuple[str, int]]) -> list[int | None]:
        if (failing.queue, failing.position) in keys:
            raise error
        return real(keys)

    monkeypatch.setattr(broker.dead_letters, "retry", retry)
    results = list[ops.LetterResult]()
    if stay is None:
        with pytest.raises(type(error)):
            results.extend(ops.retry(broker, letters))
        assert results == []
        return
    results.extend(ops.retry(broker, letters))
    kept = [each.letter for each in results if not each.done]
    assert kept == [letters[number] for number in stay]
    assert all(each.error for each in results if not each.done)
    assert len(results) == 250
    for queue in ("q0", "q1", "q2"):
        again = [row[1] for row in broker.reader(queue, letters[-1].entry.position).fetch(999)]
        assert again == sorted(again, key=int)
    assert len(broker.dead_letters.records()) == len(stay)


@pytest.mark.parametrize(("act", "method"), [(ops.retry, "retry"), (ops.discard, "expire")])
def test_a_refused_request_stops_no_other(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, act: Any, method: str
) -> None:
    """Nor does it hide that the broker is away."""
    store = broker.requests
    for id in "abc":
        store.ask([NewRequest("pool", id, (b"1", None), id.encode())])
        (taken,) = store.take("w", "pool", 1, []).requests
        store.end(taken.take, "failed", error="E")
    letters = ops.find(broker, ops.Filter("pool"), 2e9)
    real = getattr(store, method)
    errors: list[Exception] = [UsageError(reason="no")]

    def call(given: Any, *more: Any) -> Any:
        if "b" in given:
            raise errors[0]
        return real(given, *more)

    monkeypatch.setattr(store, method, call)
    found = {each.letter.id: (each.done, bool(each.error)) for each in act(broker, letters)}
    assert found == {"a": (True, False), "b": (False, True), "c": (True, False)}
    errors[0] = PostgresqlUnreachableError(server="db", reason="it is down")
    with pytest.raises(PostgresqlUnreachableError):
        list(act(broker, letters))
