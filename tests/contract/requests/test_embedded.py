"""Requests in the embedded broker's file: its locks, groups, formats, types, and indexes."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.base import Outgoing
from qdo.brokers.embedded import requests
from qdo.brokers.embedded.broker import EmbeddedBroker
from qdo.brokers.embedded.schema import MESSAGES, Query
from qdo.brokers.requests import NewRequest
from qdo.errors import DatabaseReplacedError, QdoError, RequestExistsError
from qdo.system.sqlite import open_database
from tests.support.processes import wait_until

APP = "shop:app"


@pytest.fixture
def broker(path: str) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(path, APP)
    yield broker
    broker.close()


def new(id: str, body: bytes = b"1", **options: Any) -> NewRequest:
    return NewRequest("p", id, (body, '{"h": "1"}'), body, **options)


def execute(path: str, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, values)
    connection.close()


def test_a_look_that_finds_nothing_takes_no_lock(broker: EmbeddedBroker) -> None:
    """While nothing is due, or there is no place, and the worker runs all that it owns."""
    broker.requests.ask([new("1"), new("2", due=4e9)])
    broker.requests.take("w", "p", 1, [])
    broker.requests.mark("1", '{"cancel": ""}')
    commits = broker.commits
    assert broker.requests.take("w", "p", 9, ["1"]).marks == {"1": '{"cancel": ""}'}
    broker.requests.take("x", "p", 9, [])
    broker.requests.take("x", "none", 9, [])
    assert broker.requests.expire() == 0
    broker.requests.ask([new("3")])
    broker.requests.take("w", "p", 0, ["1"])
    assert broker.commits == commits + 1


def test_each_call_of_a_group_has_its_own_outcome(broker: EmbeddedBroker, path: str) -> None:
    """A group that fails is repeated call by call: an end with its message, a send, an ask."""
    broker.requests.ask([new("1")])
    (taken,) = broker.requests.take("w", "p", 9, []).requests
    found: list[object] = []

    def attempt(work: Any) -> None:
        try:
            found.append(work())
        except QdoError as error:
            found.append(type(error))

    works = [
        lambda: broker.requests.end(taken.take, "done", messages=[Outgoing("told", b"over")]),
        lambda: len(broker.send_many([Outgoing("told", b"1"), Outgoing("told", b"2")])),
        lambda: broker.requests.ask([new("2"), new("1", b"other")]),
        lambda: broker.requests.ask([new("3")]),
    ]
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    threads = [threading.Thread(target=attempt, args=[each]) for each in works]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda count=count: broker.waiting == count, "it waits")  # type: ignore[misc]
    lock.execute("ROLLBACK")
    lock.close()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == sorted(map(str, [True, 2, RequestExistsError, [True]]))
    assert [row[1] for row in broker.reader("told", 0).fetch(9)] == [b"over", b"1", b"2"]
    assert [each.id for each in broker.requests.records()] == ["1", "3"]


def test_no_number_is_used_twice(broker: EmbeddedBroker, path: str) -> None:
    """Requests keep their age, also when the newest ones were deleted."""
    broker.requests.ask([new("1"), new("2", keep_seconds=0.0)])
    assert broker.requests.end(broker.requests.records()[1].take, "cancelled")
    assert broker.requests.expire() == 1
    broker.requests.ask([new("3")])
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT number FROM requests").fetchall() == [(1,), (3,)]
    connection.close()


@pytest.mark.parametrize("value", ["'text'", "x'ff'", "0.5", "NULL"])
def test_no_program_stores_a_value_of_a_wrong_type(
    broker: EmbeddedBroker, path: str, value: str
) -> None:
    """A row that cannot be read would stop all others of its pool."""
    broker.requests.ask([new("1"), new("2")])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(requests)")][2:]
        refused = set()
        for column in columns:
            try:
                connection.execute(f"UPDATE requests SET {column} = {value} WHERE number = 1")
            except sqlite3.IntegrityError:
                refused.add(column)
            assert len(broker.requests.records()) == 2
    assert {"state", "take"} <= refused
    assert broker.requests.find("2") is not None


def test_a_replaced_file_is_noticed(broker: EmbeddedBroker, path: str) -> None:
    """It would look like an empty pool forever."""
    broker.requests.take("w", "p", 9, [])
    Path(path).rename(f"{path}.old")
    with pytest.raises(DatabaseReplacedError):
        broker.requests.take("w", "p", 9, [])


def test_no_query_looks_at_every_request(path: str) -> None:
    """Neither at those that are over, nor at those that wait, to find those that it needs."""
    connection = open_database(path, MESSAGES)
    values = dict.fromkeys(["app", "id", "owner", "take", "pool", "places", "now", "limit"], "1")
    values["oldest"] = "1"
    values |= {"running": "[]", "states": "[]"}
    statements = {
        name: each.sql if isinstance(each, Query) else each
        for name, each in vars(requests).items()
        if isinstance(each, Query) or (isinstance(each, str) and "WHERE" in each)
        if name not in ("_OF_TAKE", "_RUN", "_ADD", "_HAS_STEPS", "_DELETE")
    }
    names = ("failed", "error", "state", "note", "outcome", "result", "headers", "mark", "cancels")
    values |= dict.fromkeys((*names, "asked", "seconds", "since"), "1")
    assert len(statements) > 10
    for name, statement in statements.items():
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
        for *_, step in plan:
            assert "SCAN requests" not in step, (name, plan)
    for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {requests._DUE.sql}", values):
        assert "TEMP B-TREE" not in step
    connection.close()
