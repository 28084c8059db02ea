"""Requests in the embedded broker's file.

A report about a take (`note`, `end`, `put_back`) is one statement, which also checks that the
take still counts. The same transaction sends the messages of
the change. `take` first looks without the write lock, because idle workers look often.

SQLite refuses values of a wrong type from any program, so no row can block other rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.embedded.delayed import send_with_options
from qdo.brokers.embedded.schema import Query, Row
from qdo.brokers.embedded.writer import EmbeddedTables, Transaction
from qdo.brokers.request_checks import (
    check_content,
    check_request_text,
    check_requests,
    storable_text,
)
from qdo.brokers.request_store import EXPIRED_AT_ONCE, TAKEN_BYTES, RequestStore
from qdo.brokers.requests import (
    FAILED,
    IN_STEPS,
    OUTCOMES,
    OVER,
    RECORD_FIELDS,
    STATES,
    TAKEN_FIELDS,
    Content,
    NewRequest,
    PoolCounts,
    RequestRecord,
    Take,
    Taken,
    record_of,
    taken_of,
)
from qdo.encoding import MAX_STORED_BODY_BYTES
from qdo.errors import RequestExistsError, UnsupportedError
from qdo.positions import time_of_position
from qdo.system.files import Rights
from qdo.system.fork_guard import unforked
from qdo.system.sqlite import translated
from qdo.system.wakeup_pipes import PipeThread

# The time after which a listener calls `wake` even without a wakeup.
QUIET_SECONDS = 60.0
# The tolerance for the rounding error of a Unix time as a float, about a microsecond.
SLACK_SECONDS = 0.00001

_ADD = """
INSERT INTO requests (app, id, pool, priority, due, rank, asked, keep, digest, reply, headers, body,
                      parent, deadline, state)
VALUES (:app, :id, :pool, :priority, :due, CASE WHEN :due <= :now THEN :priority ELSE :due END,
        :now, :keep_seconds, :digest, :reply, :headers, :body,
        :parent, :deadline, CASE WHEN :paused THEN 2 ELSE 0 END) ON CONFLICT (app, id) DO NOTHING
"""
_ASKED = ("id", "pool", "priority", "due", "keep_seconds", "digest", "reply", "parent", "deadline")
_DIGEST = Query("SELECT digest FROM requests WHERE app = :app AND id = :id", "b")
_PARENT = Query("SELECT parent FROM requests WHERE app = :app AND id = :id", "T")
_OWN = Query(
    "SELECT id, mark FROM requests"
    " WHERE app = :app AND owner = :owner AND pool = :pool AND state IN (1, 2)",
    "tT",
)
_NEXT = Query(
    "SELECT rank FROM requests WHERE app = :app AND pool = :pool AND state = 0"
    " ORDER BY rank LIMIT 1",
    "r",
)
_MAKE_DUE = f"""
UPDATE requests SET rank = priority
WHERE app = :app AND pool = :pool AND state = 0 AND rank BETWEEN 10 AND :now + {SLACK_SECONDS}
"""  # noqa: S608 - constants
_TAKEN = f"SELECT number, id, take + 1, {', '.join(TAKEN_FIELDS)}, headers, body"
_TAKEN_TYPES = "itiiiiTrTTb"
_LOST = Query(
    f"{_TAKEN} FROM requests WHERE app = :app AND owner = :owner AND pool = :pool"  # noqa: S608
    " AND state IN (1, 2) AND id NOT IN (SELECT value FROM json_each(:running)) ORDER BY number",
    _TAKEN_TYPES,
)
_DUE = Query(
    f"{_TAKEN} FROM requests WHERE app = :app AND pool = :pool AND state = 0 AND rank < 10"
    " ORDER BY rank, number LIMIT :places",
    _TAKEN_TYPES,
)
# Search for the first requests of each priority, because no index has the order of all requests.
_OLDEST = Query(
    f"{_TAKEN} FROM requests WHERE number IN ("  # noqa: S608 - constants
    + " UNION ALL ".join(
        "SELECT number FROM (SELECT number FROM requests WHERE app = :app AND pool = :pool"  # noqa: S608
        f" AND state = 0 AND rank = {priority} ORDER BY number LIMIT :oldest)"
        for priority in range(10)
    )
    + ") ORDER BY number LIMIT :oldest",
    _TAKEN_TYPES,
)
_IS_CANCEL = """mark LIKE '{"cancel"%'"""
_NO_ANSWER = f"mark = CASE WHEN {_IS_CANCEL} THEN mark END"
_RUN = f"""
UPDATE requests SET state = 1, owner = ?, take = take + 1, started = ?, note = NULL, {_NO_ANSWER}
WHERE number = ?
"""  # noqa: S608 - constants
_OF_TAKE = "WHERE app = :app AND id = :id AND owner = :owner AND take = :take"
_NOTE = f"""
UPDATE requests SET state = :state, note = :note,
       mark = CASE WHEN {_IS_CANCEL} OR (:state = 2 AND state = 2) THEN mark
                   WHEN :state = 2 THEN printf('{{"paused": %.6f}}', :now) END
{_OF_TAKE} AND state IN (1, 2)
"""  # noqa: S608 - constants
_END = f"""
UPDATE requests SET state = 3, outcome = :outcome, error = :error, mark = NULL, until = :now + keep,
       failed = coalesce(:failed, failed), result_headers = :headers, result = :result,
       note = CASE :outcome WHEN 'done' THEN NULL ELSE note END,
       headers = CASE :outcome WHEN 'done' THEN NULL ELSE headers END,
       body = CASE :outcome WHEN 'done' THEN x'' ELSE body END
{_OF_TAKE} AND state < 3
"""  # noqa: S608 - constants
# The request of an ended step; with its last open step, it waits again.
_WAKE = """
UPDATE requests AS held SET state = 0, due = :now, rank = priority, note = NULL
WHERE app = :app AND id = :id AND state = 2 AND owner = '' AND take > 0 AND NOT EXISTS (
    SELECT 1 FROM requests WHERE app = :app AND parent = held.id AND state < 3)
"""
_SUSPEND = f"""
UPDATE requests SET state = 2, owner = '', note = :note, failed = 0, crashed = 0
{_OF_TAKE} AND state IN (1, 2)
"""  # noqa: S608 - constants
_ENDED = Query(f"SELECT state FROM requests {_OF_TAKE} AND state = 3", "i")  # noqa: S608
_WAIT = f"state = 0, owner = '', note = NULL, {_NO_ANSWER}"
_PUT_BACK = f"""
UPDATE requests SET {_WAIT}, due = :now + :seconds,
       rank = CASE WHEN :seconds > 0 THEN :now + :seconds ELSE priority END,
       crashed = crashed AND failed = :failed, failed = :failed, error = coalesce(:error, error)
{_OF_TAKE} AND state IN (1, 2)
"""  # noqa: S608 - constants
_GIVE_BACK = f"""
UPDATE requests SET {_WAIT}, due = :now, rank = priority, crashed = 1, failed = failed + 1,
       error = 'worker ' || owner || ' died, or lost its session'
WHERE app = :app AND owner = :owner AND state IN (1, 2)
"""  # noqa: S608 - constants
_RETRY = f"""
UPDATE requests SET {_WAIT}, due = :now, rank = priority, crashed = 0, failed = 0, take = take + 1,
       error = NULL, outcome = NULL, result_headers = NULL, result = NULL, until = 0, deadline = 0
WHERE app = :app AND id = :id AND state = 3 AND outcome <> 'done' AND parent IS NULL
"""  # noqa: S608 - constants
_HAS_STEPS = "EXISTS (SELECT 1 FROM requests WHERE app = :app AND parent = held.id)"
_MARK = f"""
UPDATE requests AS held SET mark = CASE WHEN :cancels AND {_HAS_STEPS} THEN mark ELSE :mark END,
       deadline = CASE WHEN :cancels AND {_HAS_STEPS} THEN :now ELSE deadline END
WHERE app = :app AND id = :id
      AND CASE WHEN :cancels THEN state IN (1, 2) AND owner <> '' OR state < 3 AND {_HAS_STEPS}
               ELSE state = 2 AND owner <> '' AND mark IS :asked
                   AND coalesce(mark, '{{"paused"') LIKE '{{"paused"%' END
"""  # noqa: S608 - constants
_OWNERS = Query(
    "SELECT DISTINCT owner FROM requests WHERE app = :app AND owner > '' AND state IN (1, 2)", "t"
)
_RECORD = f"SELECT number, id, owner, take, {', '.join(RECORD_FIELDS)}"
_RECORD_TYPES = "itti" + "".join(
    {"str": "t", "int": "i", "float": "r", "str | None": "T"}[str(each.type)]
    for each in fields(RequestRecord)
    if each.name in RECORD_FIELDS
)
_FIND, _FIND_BRIEF = (
    Query(
        f"{_RECORD}, {columns}, result_headers, result FROM requests WHERE app = :app AND id = :id",
        _RECORD_TYPES + "TbTB",
    )
    for columns in ("headers, body", "NULL, x''")
)
_FAMILY = Query(
    f"{_RECORD}, NULL, x'', result_headers, result FROM requests"
    " WHERE app = :app AND (id = :id OR parent = :id) ORDER BY number LIMIT :limit",
    _RECORD_TYPES + "TbTB",
)
# Steps of a late request are late if the job has asked for them before; later ones compensate.
_LATE = Query(
    f"""
WITH RECURSIVE overdue (id, until) AS (
    SELECT id, deadline FROM requests
    WHERE app = :app AND deadline > 0 AND deadline <= :now AND state < 3
    UNION SELECT step.id, overdue.until FROM overdue JOIN requests AS step ON step.app = :app
    AND step.parent = overdue.id AND step.state < 3 AND step.asked <= overdue.until)
{_RECORD}, NULL, x'', NULL, NULL FROM requests AS held
WHERE app = :app AND id IN (SELECT id FROM overdue) AND NOT {_HAS_STEPS}
    AND (mark IS NULL OR NOT {_IS_CANCEL}) LIMIT :limit
""",  # noqa: S608 - constants
    _RECORD_TYPES + "TbTB",
)
_CONDITIONS = ("state = 0", "state IN (1, 2)", "state IN (1, 2)", "state = 3")
_ENDS = {each: f"state = 3 AND outcome = '{each}'" for each in OUTCOMES}
_ENDS[FAILED] += " AND parent IS NULL"
# The queries by condition and order. For a separate query, SQLite chooses the right index.
_LIST = {
    (condition, order): Query(
        f"{_RECORD}, NULL, x'', NULL, NULL FROM requests WHERE app = :app AND {condition}"  # noqa: S608
        " AND (:pool IS NULL OR pool = :pool)"
        " AND (:states = '[]' OR state IN (SELECT value FROM json_each(:states)))"
        f" ORDER BY number {order} LIMIT :limit",
        _RECORD_TYPES + "TbTB",
    )
    for condition in ("true", *_CONDITIONS, *_ENDS.values())
    for order in ("ASC", "DESC")
}
# A query with one index search for each pool, instead of a read of each request.
_POOLS_DUE = Query(
    """
WITH RECURSIVE pools (name) AS (
    SELECT min(pool) FROM requests WHERE app = :app AND state = 0
    UNION ALL
    SELECT (SELECT min(pool) FROM requests WHERE app = :app AND state = 0 AND pool > name)
    FROM pools WHERE name IS NOT NULL)
SELECT name, (SELECT min(rank) FROM requests WHERE app = :app AND state = 0 AND pool = name)
FROM pools WHERE name IS NOT NULL
UNION ALL SELECT pool, 0.0 FROM requests WHERE app = :app AND owner = :owner AND owner > ''
    AND state IN (1, 2) AND id NOT IN (SELECT value FROM json_each(:running))
""",
    "tr",
)
_COUNTS = Query(
    """
SELECT pool, state, count(*), min(CASE WHEN due <= :now THEN max(asked, due) END)
FROM requests WHERE app = :app AND state = 0 GROUP BY pool
UNION ALL SELECT pool, state, count(*), NULL
FROM requests WHERE app = :app AND state IN (1, 2) GROUP BY pool, state
UNION ALL SELECT pool, 3, count(*), NULL
FROM requests WHERE app = :app AND state = 3 AND outcome = 'failed' AND parent IS NULL
GROUP BY pool ORDER BY state
""",
    "tiiR",
)
_EXPIRED = Query(
    "SELECT id FROM requests WHERE app = :app AND state = 3 AND parent IS NULL"  # noqa: S608
    f" AND outcome IS NOT 'failed' AND until <= :now LIMIT {EXPIRED_AT_ONCE}",
    "t",
)
# Delete requests and their steps, because a later request with the same id must not find them.
_DELETE = """
DELETE FROM requests WHERE app = :app AND id IN (
    WITH RECURSIVE gone (id) AS (
        SELECT * FROM ({condition})
        UNION SELECT step.id FROM gone JOIN requests AS step
            ON step.app = :app AND step.parent = gone.id)
    SELECT id FROM gone)
"""
_OVER = "SELECT id FROM requests WHERE app = :app AND id = :id AND state = 3"
_REPLACE = _DELETE.format(condition=f"{_OVER} AND until <= :now")
_DISCARD = _DELETE.format(condition=f"{_OVER} AND outcome = 'failed' AND parent IS NULL")
_EXPIRE = _DELETE.format(condition=_EXPIRED.sql)
_FORGET = "DELETE FROM requests WHERE app = :app AND id = :id AND parent IS NOT NULL"


def _execute(transaction: Transaction, statement: str, **values: Any) -> int:
    """Execute a statement for the app; return the number of changed rows."""
    of = {**values, "app": transaction.app, "now": _now(transaction)}
    return transaction.connection.execute(statement, of).rowcount


def _now(transaction: Transaction) -> float:
    return time_of_position(transaction.now())


def _add(transaction: Transaction, request: NewRequest) -> bool:
    body, headers = request.content
    asked = {each: getattr(request, each) for each in _ASKED}
    for each in ("due", "deadline"):
        if asked[each] < 0:
            asked[each] = _now(transaction) - asked[each]
    asked["paused"] = request.paused
    added = _execute(transaction, _ADD, **asked, body=body, headers=headers)
    if not added and _execute(transaction, _REPLACE, id=request.id):
        return _add(transaction, request)
    if not added:
        of = {"app": transaction.app, "id": request.id}
        if _DIGEST.only(transaction.connection, of) != (request.digest,):
            raise RequestExistsError(id=request.id)
    transaction.wakes_takers = True
    return added > 0


def _take(transaction: Transaction, of: dict[str, Any]) -> Taken:
    connection = transaction.connection
    now = _now(transaction)
    _execute(transaction, _MAKE_DUE, **of)
    with (
        contextlib.closing(_LOST.each(connection, of)) as lost,
        contextlib.closing(_OLDEST.each(connection, of)) as oldest,
        contextlib.closing(_DUE.each(connection, of)) as due,
    ):  # before the rows are changed
        waiting = itertools.islice(_distinct(itertools.chain(oldest, due)), of["places"])
        rows = _fitting(itertools.chain(lost, waiting))
    connection.executemany(_RUN, [(of["owner"], now, row[0]) for row in rows])
    requests = [taken_of(of["owner"], of["pool"], *row[1:]) for row in rows]
    _, seen = _look(connection, of)
    return replace(seen, requests=requests)


def _wake(transaction: Transaction, id: str, own: bool) -> None:
    """Let a suspended request, or that of an ended step, wait again if its steps are over."""
    of = {"app": transaction.app, "id": id}
    (parent,) = (id,) if own else _PARENT.first(transaction.connection, of) or (None,)
    if parent is not None and _execute(transaction, _WAKE, id=parent):
        transaction.wakes_takers = True


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield each row once, because the oldest request may also be the most urgent request."""
    numbers = set[int]()
    for row in rows:
        if row[0] not in numbers:
            numbers.add(row[0])
            yield row


def _fitting(rows: Iterable[Row]) -> list[Row]:
    """Return the first rows until the bodies reach `TAKEN_BYTES`."""
    chosen = []
    size = 0
    for row in rows:
        chosen.append(row)
        size += len(row[-1])
        if size >= TAKEN_BYTES:
            break
    return chosen


def _look(connection: sqlite3.Connection, of: dict[str, Any]) -> tuple[set[str], Taken]:
    """Return the ids of the worker's requests in the pool, and a `Taken` without requests."""
    own: dict[str, str | None] = dict(_OWN.all(connection, of))
    (next_due,) = _NEXT.first(connection, of) or (None,)
    return {*own}, Taken((), {id: mark for id, mark in own.items() if mark is not None}, next_due)


def _guard(take: Take) -> dict[str, Any]:
    return {"id": take.id, "owner": take.owner, "take": take.number}


class EmbeddedRequests(RequestStore):
    """The requests of one app in a file.

    :ivar stops: the functions that the closing broker calls to stop the listeners.
    :param check: a function that returns the size of a message, or raises an error if the broker
        cannot store the message.
    """

    def __init__(self, tables: EmbeddedTables, check: Callable[[Outgoing], int]) -> None:
        self._tables = tables
        self._read = tables.read
        self._check = check
        self.stops: list[Callable[[], None]] = []

    def ask(self, requests: Sequence[NewRequest], connection: Any = None) -> list[bool]:
        if connection is not None:
            what = "ask in a transaction of the app"
            remedy = "give requests an app with a PostgreSQL broker"
            raise UnsupportedError(broker="this broker", what=what, remedy=remedy)
        size = check_requests(requests, MAX_STORED_BODY_BYTES)
        return self._tables.change(
            lambda transaction: [_add(transaction, each) for each in requests], size
        )

    def take(
        self, owner: str, pool: str, places: int, running: Collection[str], oldest: int = 0
    ) -> Taken:
        of = {
            "app": self._tables.app,
            "owner": owner,
            "pool": pool,
            "places": max(places, 0),
            "running": json.dumps([*running]),
            "oldest": oldest,
        }
        with unforked, translated(self._tables.path):
            own, seen = _look(self._tables.reading, of)
        is_due = seen.next_due is not None and seen.next_due <= self._now() + SLACK_SECONDS
        if (places > 0 and is_due) or not own.issubset(running):
            return self._tables.change(lambda transaction: _take(transaction, of))
        self._tables.watch.check()  # a deleted file would look like an empty pool forever
        return seen

    def note(
        self, take: Take, state: int, note: str | None, messages: Sequence[Outgoing] = ()
    ) -> bool:
        text = storable_text(note)
        if state == IN_STEPS:
            return self._change(_SUSPEND, take, messages, note=text)
        return self._change(_NOTE, take, messages, state=state, note=text)

    def end(
        self,
        take: Take,
        outcome: str,
        result: Content | None = None,
        error: str | None = None,
        messages: Sequence[Outgoing] = (),
        failed: int | None = None,
    ) -> bool:
        size = check_content(take.id, result, MAX_STORED_BODY_BYTES)
        data, headers = result or (None, None)
        of = {"outcome": outcome, "result": data, "headers": headers, "failed": failed}
        of["error"] = storable_text(error)
        return self._change(_END, take, messages, size, **of) or bool(
            self._read(_ENDED, **_guard(take))
        )

    def put_back(self, take: Take, failed: int, seconds: float, error: str | None) -> bool:
        of = {"failed": failed, "seconds": seconds, "error": storable_text(error)}
        return self._alter(_PUT_BACK, **_guard(take), **of) > 0

    def retry(self, id: str, forget: Collection[str] = ()) -> bool:
        check_request_text("the id of a request", id)

        def work(transaction: Transaction) -> bool:
            found = _execute(transaction, _RETRY, id=id) > 0
            for step in forget if found else ():
                _execute(transaction, _FORGET, id=step)
            transaction.wakes_takers = transaction.wakes_takers or found
            return found

        return self._tables.change(work)

    def mark(self, id: str, mark: str, asked: str | None = None) -> bool:
        check_request_text("the id of a request", id)
        check_request_text("the mark of a request", mark)
        cancels = mark.startswith('{"cancel"')
        return self._alter(_MARK, id=id, mark=mark, asked=asked, cancels=cancels) > 0

    def owners(self) -> list[str]:
        return [owner for (owner,) in self._read(_OWNERS)]

    def give_back(self, owner: str) -> int:
        return self._alter(_GIVE_BACK, owner=owner)

    def find(self, id: str, *, whole: bool = True) -> RequestRecord | None:
        check_request_text("the id of a request", id)
        for row in self._read(_FIND if whole else _FIND_BRIEF, id=id):
            return record_of(*row[1:])
        return None

    def records(
        self,
        pool: str | None = None,
        states: Collection[int] = (),
        limit: int = 1000,
        *,
        newest: bool = False,
        outcome: str | None = None,
        of: str | None = None,
        late: bool = False,
    ) -> list[RequestRecord]:
        if of is not None or late:
            rows = self._read(_LATE if late else _FAMILY, id=of, now=self._now(), limit=limit)
            return [record_of(*row[1:]) for row in rows]
        values = {"pool": pool, "states": json.dumps([*states]), "limit": limit}
        conditions = {_CONDITIONS[each] for each in states} or {"true"}
        if outcome is not None:
            conditions = {_ENDS[outcome]}
        order = "DESC" if newest else "ASC"
        found = [self._read(_LIST[each, order], **values) for each in conditions]
        rows = sorted(itertools.chain(*found), reverse=newest)
        return [record_of(*row[1:]) for row in rows[:limit]]

    def due(self, owner: str = "", running: Collection[str] = ()) -> dict[str, float]:
        found = self._read(_POOLS_DUE, owner=owner, running=json.dumps([*running]))
        return {pool: rank if rank > 9 else 0.0 for pool, rank in found}

    def counts(self) -> dict[str, PoolCounts]:
        counts: dict[str, PoolCounts] = {}
        for pool, state, count, oldest in self._read(_COUNTS, now=self._now()):
            before = counts.get(pool) or PoolCounts(0, 0, 0, oldest)
            name = FAILED if state == OVER else STATES[state]
            counts[pool] = replace(before, **{name: count})
        return counts

    def expire(self, failed: Sequence[str] = ()) -> int:
        if failed:
            return self._tables.change(
                lambda transaction: sum(_execute(transaction, _DISCARD, id=id) for id in failed)
            )
        if not self._read(_EXPIRED, now=self._now()):
            return 0  # without the write lock, because most calls find no expired requests
        return self._tables.change(lambda transaction: _execute(transaction, _EXPIRE))

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        def step() -> float:
            wake()
            return QUIET_SECONDS

        path = self._tables.path
        with translated(path):
            wakeups = self._tables.writer.request_wakeups
            listener = PipeThread(wakeups, Rights.of(path), step)
        listener.start()
        self.stops.append(listener.stop)
        return listener.stop

    def _now(self) -> float:
        return time_of_position(self._tables.writer.clock())

    def _alter(self, statement: str, **values: Any) -> int:
        """Execute a statement that makes requests due or marks them; wake the listeners."""

        def work(transaction: Transaction) -> int:
            changed = _execute(transaction, statement, **values)
            transaction.wakes_takers = transaction.wakes_takers or changed > 0
            return changed

        return self._tables.change(work)

    def _change(
        self,
        statement: str,
        take: Take,
        messages: Sequence[Outgoing],
        size: int = 0,
        **values: Any,
    ) -> bool:
        """Change a request if the take is valid, and send messages."""
        size += sum(map(self._check, messages))

        def work(transaction: Transaction) -> bool:
            changed = _execute(transaction, statement, **_guard(take), **values)
            if changed and messages:
                self._send(transaction, messages)
            if changed and statement in (_END, _SUSPEND):
                _wake(transaction, take.id, own=statement == _SUSPEND)
            return changed > 0

        return self._tables.change(work, size)

    def _send(self, transaction: Transaction, messages: Sequence[Outgoing]) -> None:
        send_with_options(transaction, messages, self._tables.node)
