"""How often the dashboard reads: once for all clients, and only while a client asks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from qdo.dashboard import reading as fleet_reader
from qdo.dashboard.reading import ConnectedThread, DirectReads
from qdo.errors import DatabaseError, UnreadError
from tests.support.dashboard.shop import FilledShop, Visitor
from tests.support.processes import wait_until

CLIENTS = 10


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the reader has read."""
    found: list[Any] = []
    real = fleet_reader.queue_statuses

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(fleet_reader, "queue_statuses", counted)
    return found


def all_at_once(visitor: Visitor, path: str) -> list[int]:
    """Let many clients ask for a page at the same time; return the codes of the answers."""
    gate = threading.Barrier(CLIENTS)

    def ask(number: int) -> int:
        client = Visitor(visitor.flask)
        gate.wait()
        return int(client.get(path).status_code)

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(CLIENTS)))


def test_all_clients_share_one_reading(local_shop: FilledShop, reads: list[Any]) -> None:
    """Ten browsers at once, on three pages and in JSON."""
    visitor = local_shop.visitor(pause_seconds=3600.0)
    for path in ("/", "/queues", "/workers", "/api/queues", "/api/status"):
        assert all_at_once(visitor, path) == [200] * CLIENTS
    assert len(reads) == 1


def test_nothing_is_read_while_nobody_looks(local_shop: FilledShop, reads: list[Any]) -> None:
    """Neither before the first visitor nor after the last; the next one gets a new reading."""
    visitor = local_shop.visitor(pause_seconds=0.01)
    assert reads == []
    visitor.page("/")
    reader = visitor.reader
    wait_until(lambda: reader._pending is None or reader._pending.done(), "the reading ends")
    before = len(reads)
    threading.Event().wait(0.3)  # thirty pauses
    assert len(reads) == before
    local_shop.app.send("came-later", 1)
    # A page waits only a little for a reading: on a busy machine it may show the former one.
    wait_until(lambda: "came-later" in visitor.page("/queues"), "a visitor gets a new reading")


def test_a_long_reading_is_followed_by_a_longer_pause(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes a bounded share of the time, however many queues there are."""
    now = [0.0]
    monkeypatch.setattr(fleet_reader, "clock", lambda: now[0])

    def slow(*arguments: Any) -> list[Any]:
        now[0] += 2.0
        return []

    monkeypatch.setattr(fleet_reader, "read_components", slow)
    monkeypatch.setattr(fleet_reader, "worker_statuses", lambda *arguments: [])
    reader = local_shop.visitor(pause_seconds=5.0).reader
    wait_until(lambda: reader.look(1.0) is not None, "the app is read")
    wait_until(lambda: reader._due > 2.0, "the reading has ended")
    reading = reader.look()
    assert reading is not None
    assert reading.pause_seconds == fleet_reader.SHARE * 2.0
    now[0] += fleet_reader.SHARE * 2.0 - 0.1
    assert reader.look(1.0) is reading
    now[0] += 0.2
    wait_until(lambda: reader.look(1.0) is not reading, "it is read again")


def test_clients_share_the_other_reads_too(local_shop: FilledShop) -> None:
    """Pauses, limits and the action log, for some seconds."""
    visitor = local_shop.visitor()
    direct = visitor.flask.extensions["qdo"].direct
    calls: list[int] = []
    real = direct._thread.submit

    def counted(function: Any) -> Any:
        calls.append(1)
        return real(function)

    direct._thread.submit = counted
    for path in ("/holds", "/holds", "/audit", "/queue?name=fine", "/api/holds", "/api/audit"):
        visitor.get(path)
    assert all_at_once(visitor, "/holds") == [200] * CLIENTS
    assert len(calls) <= 5  # holds, limits, the log, the history and dead letters of one queue


def test_all_globs_of_dead_letters_share_one_read(local_shop: FilledShop) -> None:
    """A visitor can make up any number of them."""
    visitor = local_shop.visitor()
    board = visitor.flask.extensions["qdo"]
    read: list[Any] = []
    real = board.direct._thread.submit
    board.direct._thread.submit = lambda function: read.append(function) or real(function)
    for number in range(20):
        assert visitor.get(f"/api/dead-letters?glob=*{number}*").status_code == 200
        assert visitor.get(f"/dead-letters?glob=*{number}*").status_code == 200
    assert len(read) == 2  # the list, and the bodies of none of them


def test_a_long_read_is_kept_longer(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes a bounded share of the time."""
    now = [0.0]
    monkeypatch.setattr(fleet_reader, "clock", lambda: now[0])
    reads = DirectReads(local_shop.app.settings, "test")
    found: list[float] = []

    def slow(connections: Any) -> None:
        now[0] += 2.0
        found.append(now[0])

    for later in (0.0, fleet_reader.SHARE * 2.0 - 1, 2.0):
        now[0] += later
        reads.get("x", slow)
    assert len(found) == 2
    reads.close()


def test_results_with_large_bodies_are_not_kept(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest ones are; a visitor who looks at many dead letters fills no memory."""
    monkeypatch.setattr(fleet_reader, "MOST_KEPT_BYTES", 100)
    reads = DirectReads(local_shop.app.settings, "test")
    read: list[str] = []

    def get(body: str) -> None:
        assert reads.get(body, lambda connections: read.append(body) or body, len) == body

    for body in ("a" * 60, "b" * 40, "b" * 40, "c" * 30, "b" * 40, "c" * 30, "a" * 60, "d" * 101):
        get(body)
    assert [each[0] for each in read] == ["a", "b", "c", "a", "d"]
    kept = [each.future.result() for each in reads._kept.values()]
    assert sum(map(len, kept)) <= 100
    reads.close()


def test_the_size_of_dead_letters_counts(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If pages show bodies; so do those of messages."""
    monkeypatch.setattr(fleet_reader, "MOST_KEPT_BYTES", 0)
    for shown in (False, True):
        visitor = local_shop.visitor(show_bodies=shown)
        board = visitor.flask.extensions["qdo"]
        for path in ("/api/dead-letters", "/messages?queue=fine"):
            assert visitor.get(path).status_code == 200
        kept = {key[0] for key in board.direct._kept if isinstance(key, tuple)}
        assert kept == ({"letters"} if shown else {"letters", "exported", "messages"})


def test_a_read_that_was_given_up_never_happens(local_shop: FilledShop) -> None:
    """The thread reads for the requests that wait, whatever came before."""
    reads = DirectReads(local_shop.app.settings, "test", patience_seconds=0.05)
    ends, read = threading.Event(), []
    blocking = reads._thread.submit(lambda connections: ends.wait(20))
    for number in range(3):
        with pytest.raises(UnreadError):
            reads.get(number, read.append)
    ends.set()
    blocking.result(20)
    assert reads._thread.submit(lambda connections: len(read)).result(20) == 0
    reads.close()


def test_waiting_requests_leave_threads_of_the_server(local_shop: FilledShop) -> None:
    """A request beyond the limit is answered at once, also in JSON."""
    visitor = local_shop.visitor()
    board = visitor.flask.extensions["qdo"]
    ends = threading.Event()
    board.direct._thread.submit(lambda connections: ends.wait(20))
    with ThreadPoolExecutor(fleet_reader.MOST_WAITING) as pool:
        path = "/api/dead-letters?glob=q"
        waiting = [
            pool.submit(Visitor(visitor.flask).get, f"{path}{number}")
            for number in range(fleet_reader.MOST_WAITING)
        ]
        wait_until(lambda: board.direct._room._value == 0, "all wait")
        assert visitor.get("/api/dead-letters?glob=q").status_code == 503
        ends.set()
        assert {each.result().status_code for each in waiting} == {200}


def test_a_thread_opens_again_after_an_error(local_shop: FilledShop) -> None:
    """The one who waits gets the error; the next one gets new connections."""
    thread = ConnectedThread(local_shop.app.settings, "test")

    def fail(connections: Any) -> None:
        raise DatabaseError(path="x", reason="cut")

    first = thread.submit(lambda opened: opened).result(10)
    assert thread.submit(lambda opened: opened).result(10) is first
    with pytest.raises(DatabaseError):
        thread.submit(fail).result(10)
    assert thread.submit(lambda opened: opened).result(10) is not first
    thread.close()
    with pytest.raises(RuntimeError):
        thread.submit(lambda opened: opened).result(10)
