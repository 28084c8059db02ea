"""Documents on both coordinators: copies, conflicts, hostile nodes, lost connections."""

from __future__ import annotations

import io
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import (
    DocumentConflictError,
    DocumentUnreadableError,
    DocumentValueError,
    NotFoundError,
    SetFullError,
    SharedNameError,
    UsageError,
)
from qdo.fleet import folder_view
from qdo.fleet.documents import MAX_DOCUMENT_BYTES, CoordinatorDocuments, Documents
from tests.support.cli import Run

LAYOUT = Layout.of("shop")
Plans = Callable[[], Documents]


@pytest.fixture
def plans(coordinator_url: str) -> Iterator[Plans]:
    """Return the set "plans" as another process of the app sees it."""
    apps: list[App] = []

    def make() -> Documents:
        apps.append(App("shop", coordinator=coordinator_url))
        return apps[-1].documents("plans")

    yield make
    for app in apps:
        app.close()


def client_of(documents: Documents) -> Client:
    store = documents._store()
    assert isinstance(store, CoordinatorDocuments)
    return store._client


def test_a_document_is_the_same_in_every_process(plans: Plans) -> None:
    mine, yours = plans(), plans()
    assert dict(yours) == {}
    stamp = mine.put("acme", {"quota": 100, "name": "Ünïcode"})
    yours.fresh(stamp)
    assert dict(yours) == {"acme": {"quota": 100, "name": "Ünïcode"}}
    assert len(yours) == 1
    again = mine.put("acme", [1, None, True])
    assert again > stamp
    yours.fresh(again)
    assert yours["acme"] == [1, None, True]
    mine.delete("acme")
    yours.fresh()
    assert "acme" not in yours
    with pytest.raises(NotFoundError):
        mine.delete("acme")


def test_a_new_document_is_newer_than_its_predecessor(plans: Plans) -> None:
    """Its version is smaller: a copy that compared versions would keep the old one."""
    mine, yours = plans(), plans()
    for number in range(5):
        mine.put("acme", number)
    yours.fresh()
    assert yours["acme"] == 4
    mine.delete("acme")
    yours.fresh(mine.put("acme", "new"))
    assert yours["acme"] == "new"


def test_of_two_writers_at_one_version_one_is_told(plans: Plans) -> None:
    mine, yours = plans(), plans()
    mine.put("acme", 1, if_version=None)
    with pytest.raises(DocumentConflictError) as caught:
        yours.put("acme", 2, if_version=None)
    assert caught.value.details["name"] == "acme"
    yours.fresh()
    version = yours.version("acme")
    mine.put("acme", 3)
    with pytest.raises(DocumentConflictError):
        yours.put("acme", 4, if_version=version)
    with pytest.raises(DocumentConflictError):
        yours.delete("acme", if_version=version or 0)
    yours.fresh()
    yours.put("acme", 5, if_version=yours.version("acme"))
    mine.fresh()
    assert mine["acme"] == 5


def test_concurrent_changes_are_all_made(plans: Plans) -> None:
    mine = plans()
    mine.put("count", 0)

    def count() -> None:
        own = plans()
        for _ in range(20):
            own.change("count", lambda value: value + 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine.fresh()
    assert mine["count"] == 80


def test_changes_are_reported_with_their_values(plans: Plans) -> None:
    mine, yours = plans(), plans()
    mine.put("old", 1)
    yours.fresh()
    seen: list[tuple[str, Any]] = []
    yours.on_change(lambda name, value: seen.append((name, value)))
    yours.on_change(lambda name, value: 1 / 0)
    yours.on_change(lambda name, value: _nothing())
    yours.fresh(mine.put("acme", 2))
    mine.delete("acme")
    yours.fresh()
    assert seen == [("acme", 2), ("acme", None)]


async def _nothing() -> None:
    """Do what no listener may: as a coroutine it would never run."""


def test_listeners_run_when_they_are_called(plans: Plans) -> None:
    with pytest.raises(UsageError):
        plans().on_change(_nothing)


def test_names_that_cannot_be_nodes(plans: Plans) -> None:
    mine = plans()
    names: list[Any] = ["a/b", "", ".", "..", "x" * 201, "a\nb", "😀", None, 7]
    for name in names:
        with pytest.raises(SharedNameError):
            mine.put(name, 1)
        with pytest.raises(SharedNameError):
            App("shop").documents(name)


def test_values_that_would_not_arrive(plans: Plans) -> None:
    """They are refused, and nothing is written."""
    mine = plans()
    deep = json.loads("[" * 120 + "]" * 120)
    large = "x" * MAX_DOCUMENT_BYTES
    for value in ({1, 2}, float("nan"), {1: 2}, b"bytes", "\ud800", large, deep):
        with pytest.raises(DocumentValueError):
            mine.put("acme", value)
    mine.fresh()
    assert "acme" not in mine


HOSTILE = (
    b"",
    b"null",
    b"[]",
    b"7",
    b'"text"',
    b"{}",
    b'{"value"',
    b"\xff\xfe",
    b"[" * 5000,
    b'{"value": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"value": NaN}',
    b'{"value": "' + b"x" * 900_000 + b'"}',
    b'{"value": 9223372036854775808, "at": 1e400}',
)
READABLE = (
    b'{"value": 1, "by": [], "at": "yesterday"}',
    b'{"value": 1, "at": 1' + b"0" * 400 + b"}",
)


def test_a_hostile_node_costs_only_itself(plans: Plans, outsider: Client) -> None:
    mine = plans()
    mine.put("good", 1)
    for number, data in enumerate((*HOSTILE, *READABLE)):
        outsider.create(f"{LAYOUT.fleet.document_set('plans')}/{number}", data)
    mine.fresh()
    for number in range(len(HOSTILE)):
        with pytest.raises(DocumentUnreadableError) as caught:
            mine[str(number)]
        assert caught.value.details["name"] == str(number)
    assert [mine[str(len(HOSTILE) + number)] for number in range(len(READABLE))] == [1, 1]
    mine.put("good", 2)
    for number in range(len(HOSTILE)):
        mine.put(str(number), 3)
    mine.fresh()
    assert (mine["good"], {mine[str(number)] for number in range(len(HOSTILE))}) == (2, {3})


@pytest.mark.usefixtures("own_folder")
def test_a_value_on_stdin_is_stored_whole_or_not_at_all(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = b'{"quota": 1}' + b" " * 4 * MAX_DOCUMENT_BYTES + b"2"
    for data in (b'"caf\xe9"', too_large, b"[" * 100_000):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        put = cli("documents", "put", "plans", "acme", "-")
        assert (put.code, len(put.err.splitlines())) == (2, 1), put
    assert not Path("qdo-data").exists()


def test_a_full_set_takes_no_other_document(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would leave it out; those that exist can be changed."""
    monkeypatch.setattr(folder_view, "MAX_NODES", 2)
    mine = plans()
    for name in ("a", "b"):
        mine.fresh(mine.put(name, 1))
    with pytest.raises(SetFullError):
        mine.put("c", 1)
    mine.fresh(mine.put("b", 2))
    assert dict(mine) == {"a": 1, "b": 2}


def test_a_copy_after_many_changes_and_lost_connections(plans: Plans) -> None:
    """It is what a full read returns, and never older than a write that it was waited for."""
    chance = random.Random(7)
    writer, reader = plans(), plans()
    expected: dict[str, int] = {}
    len(reader)
    for number in range(400):
        name = f"d{chance.randrange(12)}"
        if name in expected and chance.random() < 0.3:
            writer.delete(name)
            del expected[name]
        else:
            stamp = writer.put(name, number)
            expected[name] = number
            if chance.random() < 0.2:
                reader.fresh(stamp)
                assert reader[name] == number
        if chance.random() < 0.05:
            client_of(reader).drop_connection("the test cuts it")
        if chance.random() < 0.02:
            client_of(writer).drop_connection("the test cuts it")
    reader.fresh()
    assert dict(reader) == expected
    assert dict(plans()) == expected


def test_a_forked_child_has_a_copy_of_its_own(plans: Plans) -> None:
    mine = plans()
    mine.put("acme", 1)
    mine.fresh()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine.put("child", mine["acme"] + 1)
            mine.fresh()
            code = 0 if mine["child"] == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    mine.fresh()
    assert dict(mine) == {"acme": 1, "child": 2}


def test_the_copy_stays_readable_after_close(plans: Plans, coordinator_url: str) -> None:
    """A closed app opens its connection again."""
    app = App("shop", coordinator=coordinator_url)
    with app:
        app.documents("plans").put("acme", 1)
    assert dict(app.documents("plans")) == {"acme": 1}
    app.close()
