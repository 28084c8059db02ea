"""The connection to PostgreSQL is cut at many bytes of each operation: done once or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qdo.broker_errors import PostgresqlUnansweredError, PostgresqlUnreachableError
from qdo.brokers.base import Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.registry import open_broker
from qdo.errors import QdoError
from qdo.positions import position_now
from tests.support.brokers import rows
from tests.support.postgresql.proxy import CuttingProxy, Direction, cutting
from tests.support.postgresql.schema import prepared
from tests.support.postgresql.server import PostgresqlDatabase
from tests.support.processes import wait_until

DIRECTIONS: tuple[Direction, ...] = ("request", "answer")
POINTS = 12
"""Cuts in each direction, spread over all bytes of an operation."""
LAST_BYTES = range(0, 120, 6)
"""Further cuts, this far from the end: in the commit, its answer, and the notification."""
LOST = (PostgresqlUnansweredError, PostgresqlUnreachableError)


def places(size: int) -> list[int]:
    """Return after how many bytes to cut."""
    spread = {1 + point * (size - 1) // (POINTS - 1) for point in range(POINTS)}
    return sorted(spread | {size - left for left in LAST_BYTES if left < size})


class Cuts:
    """A broker behind a proxy, and another that looks at what happened."""

    def __init__(self, database: PostgresqlDatabase, proxy: CuttingProxy) -> None:
        self.proxy = proxy
        self.database = database
        url = prepared(database.url())
        self.broker = open_broker(url.replace(f":{database.server.port}/", f":{proxy.port}/"), "a")
        self.witness = open_broker(url, "a")

    def attempts(
        self, act: Callable[[int], object], prepare: Callable[[int], object] = lambda number: None
    ) -> Iterator[tuple[int, object | QdoError]]:
        """Run an operation, cut elsewhere each time; yield its number and its result or error."""
        self._warm()
        for number in range(2):  # statements are prepared at their second execution
            prepare(number)
            self.proxy.forget()
            act(number)
            self._rest()
        sizes = {direction: self.proxy.forwarded(direction) for direction in DIRECTIONS}
        cuts = [
            (direction, count) for direction in DIRECTIONS for count in places(sizes[direction])
        ]
        for number, (direction, count) in enumerate(cuts, 2):
            prepare(number)
            self._warm()
            self.proxy.cut_after(direction, count)
            try:
                result: object = act(number)
            except QdoError as error:
                result = error
            self.proxy.forget()
            self._settle()
            yield number, result

    def _warm(self) -> None:
        """Open both connections again, and let their statements be prepared."""
        # The cut may have come amid the notification after a send, which the next send notices.
        with contextlib.suppress(PostgresqlUnansweredError):
            self.broker.send(Outgoing("warm", b""))
        for _ in range(2):
            self.broker.send(Outgoing("warm", b""))
            self.broker.reader("warm", 0).fetch(1)
        self._rest()

    def _rest(self) -> None:
        """Wait for the notification, which follows the result of a write, so that it is not cut."""

        def notified() -> bool:
            query = (
                "SELECT FROM pg_stat_activity"
                " WHERE client_port = ANY (%s) AND state = 'idle' AND query LIKE '%%pg_notify%%'"
            )
            with self.database.connect() as connection:
                found = connection.execute(query, (self.proxy.server_ports,)).fetchone()
            return found is not None and self.proxy.resting()

        wait_until(notified, "the notification has been answered")

    def _settle(self) -> None:
        """Wait for the end of the sessions whose connections were cut."""

        def ended() -> bool:
            query = (
                "SELECT FROM pg_stat_activity"
                " WHERE datname = current_database() AND client_port = ANY (%s)"
            )
            with self.database.connect() as connection:
                return connection.execute(query, (list(self.proxy.cut_ports),)).fetchone() is None

        wait_until(ended, "the sessions have ended")
        self.proxy.cut_ports.clear()  # the system may give them to any other session

    def close(self) -> None:
        self.broker.close()
        self.witness.close()


@pytest.fixture
def cuts(postgresql: PostgresqlDatabase) -> Iterator[Cuts]:
    with cutting(postgresql.server.port) as proxy:
        found = Cuts(postgresql, proxy)
        yield found
        found.close()


def outcomes(results: list[tuple[bool, bool]]) -> set[tuple[bool, bool]]:
    """Return the kinds of outcome (done, reported as done), and check that none is a lie."""
    assert (False, True) not in results
    return set(results)


def test_a_cut_send_is_stored_once_or_not_at_all(cuts: Cuts) -> None:
    """A send that reports an error before the server has all of it stores nothing."""
    found = []
    for number, result in cuts.attempts(
        lambda number: cuts.broker.send(Outgoing("q", b"%d" % number))
    ):
        stored = [row.body for row in rows(cuts.witness, "q")].count(b"%d" % number)
        assert stored <= 1
        assert isinstance(result, (str, PostgresqlUnansweredError))
        found.append((stored == 1, isinstance(result, str)))
    assert outcomes(found) >= {(False, False), (True, False)}
    bodies = [int(row.body) for row in rows(cuts.witness, "q")]
    assert bodies == sorted(bodies)


def test_a_cut_batch_is_stored_whole_or_not_at_all(cuts: Cuts) -> None:
    def send(number: int) -> object:
        batch = [Outgoing(f"q{index}", b"%d" % number) for index in range(3)]
        return cuts.broker.send_many(batch)

    found = []
    for number, result in cuts.attempts(send):
        stored = {
            [row.body for row in rows(cuts.witness, f"q{index}")].count(b"%d" % number)
            for index in range(3)
        }
        assert stored in ({0}, {1})
        assert isinstance(result, (list, PostgresqlUnansweredError))
        found.append((stored == {1}, isinstance(result, list)))
    assert outcomes(found) >= {(False, False), (True, False)}


def test_a_cut_fetch_loses_no_message(cuts: Cuts) -> None:
    """The reader is where it was: the next fetch returns what the cut one would have."""
    bodies = [b"%d" % number + bytes(1000) for number in range(20)]
    cuts.witness.send_many([Outgoing("q", body) for body in bodies])
    reader: Any = None

    def start(number: int) -> None:
        nonlocal reader
        reader = cuts.broker.reader("q", 0)
        if number:
            reader.fetch(1)

    failed = 0
    for _, result in cuts.attempts(lambda number: reader.fetch(10), start):
        read = 1
        if isinstance(result, QdoError):
            assert isinstance(result, PostgresqlUnreachableError)
            failed += 1
        else:
            read += 10
        assert [body for _, body, *_ in reader.fetch(5)] == bodies[read : read + 5]
    assert failed > POINTS


def test_a_cut_retry_moves_a_dead_letter_once_or_not_at_all(cuts: Cuts) -> None:
    store = cuts.witness.dead_letters

    def bury(number: int) -> None:
        body = b"%d" % number
        store.store(DeadLetterRecord("q", 1 + number, body, None, None, "e", "", 1, "w", 1))

    found = []
    for number, result in cuts.attempts(
        lambda number: cuts.broker.dead_letters.retry([("q", 1 + number)]), bury
    ):
        moved = [row.body for row in rows(cuts.witness, "q")].count(b"%d" % number)
        assert moved + (store.get("q", 1 + number) is not None) == 1
        assert isinstance(result, (list, PostgresqlUnansweredError))
        found.append((moved == 1, isinstance(result, list)))
    assert outcomes(found) >= {(False, False), (True, False)}


def test_a_cut_trim_hides_only_what_was_processed(cuts: Cuts) -> None:
    last = 0

    def send(number: int) -> None:
        nonlocal last
        cuts.witness.send_many([Outgoing("q", b"%d" % number), Outgoing("q", b"%d+" % number)])
        last = cuts.witness.catalog.backlog("q", 0).oldest or position_now()

    found = []
    for number, result in cuts.attempts(lambda number: cuts.broker.trim("q", last, 0.0), send):
        left = [row.body for row in rows(cuts.witness, "q")]
        assert left[-1] == b"%d+" % number
        hidden = cuts.witness.catalog.backlog("q", 0).oldest != last
        assert isinstance(result, (int, PostgresqlUnansweredError))
        found.append((hidden, isinstance(result, int)))
    assert outcomes(found) >= {(False, False), (True, False)}


def test_a_cut_login_is_an_error_or_a_broker(postgresql: PostgresqlDatabase) -> None:
    url = postgresql.url()
    with cutting(postgresql.server.port) as proxy:
        proxied = url.replace(f":{postgresql.server.port}/", f":{proxy.port}/")
        open_broker(proxied, "a").close()
        sizes = {direction: proxy.forwarded(direction) for direction in DIRECTIONS}
        failed = 0
        for direction in DIRECTIONS:
            for count in places(sizes[direction]):
                proxy.cut_after(direction, count)
                try:
                    open_broker(proxied, "a").close()
                except LOST:
                    failed += 1
                proxy.forget()
        assert failed > POINTS
