"""Requests in a table of the PostgreSQL schema; `functions.sql` implements each step.

Concurrent calls that store or report requests share one statement; see `writer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

from qdo.broker_errors import PostgresqlError, PostgresqlRefusedError
from qdo.brokers.base import Outgoing
from qdo.brokers.postgresql.reader import PostgresqlTables
from qdo.brokers.postgresql.writer import (
    ARRAYS,
    REQUESTS,
    UNKNOWN,
    GroupedWork,
    arrays_of,
    execute_within,
    refusal,
)
from qdo.brokers.request_checks import (
    check_content,
    check_request_text,
    check_requests,
    storable_text,
)
from qdo.brokers.request_store import TAKEN_BYTES, RequestStore
from qdo.brokers.requests import (
    FAILED,
    IN_STEPS,
    OUTCOMES,
    OVER,
    PAUSED,
    RECORD_FIELDS,
    RUNNING,
    TAKEN_FIELDS,
    WAITING,
    Content,
    NewRequest,
    PoolCounts,
    RequestRecord,
    Take,
    Taken,
    record_of,
    taken_of,
)
from qdo.encoding import LEFT_ON_SERVER, MAX_STORED_BODY_BYTES
from qdo.encryption.marks import IdMarks
from qdo.postgresql.session import PostgresqlConnection
from qdo.system.clock import clock

_ASK = """
SELECT {schema}.ask_requests(%s, %s, %b::text[], %b::text[], %b::integer[], %b::float8[],
    %b::text[], %b::float8[], %b::bytea[], %b::text[], %b::bytea[], %b::text[], %b::float8[],
    %b::integer[], %s)
"""
_TAKE = f"""
SELECT id, take, {", ".join(TAKEN_FIELDS)},
    CASE WHEN octet_length(body) > %(most)s THEN '{LEFT_ON_SERVER}' ELSE headers END,
    CASE WHEN octet_length(body) > %(most)s THEN '' ELSE body END, mark,
    next_due, looked_at, looked_through, spent
FROM {{schema}}.take_requests(
    %(app)s, %(owner)s, %(pool)s, %(places)s, %(running)b::text[], {TAKEN_BYTES}, %(since)s,
    %(passed)b::bigint[], %(whole)s, %(oldest)s)
"""  # noqa: S608 - constants
_REPORT = f"""
SELECT {{schema}}.report_requests(%s, %b::text[], %b::text[], %b::integer[], %b::integer[],
    %b::text[], %b::integer[], %b::float8[], %b::text[], %b::text[], %b::text[], %b::bytea[],
    %b::integer[], {ARRAYS}, %s)
"""
_END = f"SELECT {{schema}}.end_request(%s, %s, %s, %s, %s, %s, %b::bytea, {ARRAYS})"
_SUSPEND = "SELECT {schema}.suspend_request(%s, %s, %s, %s, %s)"
_MARK = "SELECT {schema}.mark_request(%s, %s, %s, %s)"
_RETRY = "SELECT {schema}.retry_request(%s, %s, %b::text[])"
_GIVE_BACK = "SELECT {schema}.give_back_requests(%s, %s)"
_EXPIRE = "SELECT {schema}.expire_requests(%s)"
_DISCARD = "SELECT {schema}.discard_requests(%s, %b::text[])"
_COLUMNS = f"SELECT id, owner, take, {', '.join(RECORD_FIELDS)}"
_FIND = f"""
{_COLUMNS}, headers, body, result_headers, result FROM {{schema}}.find_request(%(app)s, %(id)s)
"""
_FIND_BRIEF = f"""
{_COLUMNS}, NULL, NULL, result_headers, result FROM {{schema}}.find_request(%(app)s, %(id)s)
"""
_FAMILY = f"""
{_COLUMNS}, NULL, NULL, result_headers, result FROM {{schema}}.requests
WHERE app = %(app)s AND (id = %(id)s OR parent = %(id)s) ORDER BY number LIMIT %(limit)s
"""
# Steps of a late request are late if the job has asked for them before; later ones compensate.
_LATE = f"""
WITH RECURSIVE overdue AS (
    SELECT id, deadline AS until FROM {{schema}}.requests WHERE app = %(app)s AND deadline > 0
        AND deadline <= extract(epoch FROM clock_timestamp()) AND state < 3
    UNION SELECT step.id, overdue.until FROM overdue JOIN {{schema}}.requests AS step
        ON app = %(app)s AND step.parent = overdue.id
        WHERE step.state < 3 AND step.asked <= overdue.until
)
{_COLUMNS}, NULL, NULL, NULL, NULL FROM {{schema}}.requests AS held
WHERE app = %(app)s AND id IN (SELECT id FROM overdue)
    AND (mark IS NULL OR mark NOT LIKE '{{{{"cancel"%%') AND NOT EXISTS (
        SELECT FROM {{schema}}.requests AS step WHERE app = %(app)s AND step.parent = held.id)
LIMIT %(limit)s
"""  # noqa: S608 - constants
_RECORDS = f"""
{_COLUMNS}, NULL, NULL, NULL, NULL FROM {{schema}}.requests
WHERE app = %(app)s AND (%(pool)s::text IS NULL OR pool = %(pool)s) AND {{condition}}
ORDER BY number {{order}} LIMIT %(limit)s
"""
_OWNERS = (
    "SELECT DISTINCT owner FROM {schema}.requests"
    " WHERE app = %(app)s AND owner > '' AND state IN (1, 2)"
)
_DUE = """
WITH RECURSIVE found(pool) AS (
    (SELECT pool FROM {schema}.requests WHERE app = %(app)s AND state = 0 ORDER BY pool LIMIT 1)
    UNION ALL SELECT (
        SELECT pool FROM {schema}.requests AS further
        WHERE app = %(app)s AND state = 0 AND further.pool > found.pool ORDER BY pool LIMIT 1)
    FROM found WHERE found.pool IS NOT NULL
), clock AS MATERIALIZED (SELECT extract(epoch FROM clock_timestamp())::float8 AS now)
SELECT pool, CASE WHEN NOT EXISTS (
        SELECT FROM {schema}.requests AS held
        WHERE app = %(app)s AND held.pool = found.pool AND state = 0 AND due <= now
    ) THEN (
        SELECT min(due) - now FROM {schema}.requests AS held
        WHERE app = %(app)s AND held.pool = found.pool AND state = 0 AND due > asked
    ) END FROM found, clock WHERE pool IS NOT NULL
UNION ALL SELECT DISTINCT pool, NULL::float8 FROM {schema}.requests
WHERE app = %(app)s AND owner = %(owner)s AND owner > '' AND state IN (1, 2)
    AND id <> ALL (%(running)b::text[])
"""
_COUNTS = """
SELECT pool, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),
    count(*) FILTER (WHERE state = 2),
    min(since) FILTER (WHERE since <= extract(epoch FROM clock_timestamp())),
    count(*) FILTER (WHERE state = 3)
FROM (
    SELECT pool, state, greatest(asked, due) AS since FROM {schema}.requests
    WHERE app = %(app)s AND state = 0
    UNION ALL SELECT pool, state, NULL FROM {schema}.requests
    WHERE app = %(app)s AND state IN (1, 2)
    UNION ALL SELECT pool, state, NULL FROM {schema}.requests
    WHERE app = %(app)s AND state = 3 AND outcome = 'failed' AND parent IS NULL
) AS held GROUP BY pool
"""
_OF_REQUESTS = frozenset({REQUESTS})
_MOST_PLACES = 2**31 - 1
# After a look that read many dead rows, the next complete look waits this many times its duration.
SPARED = 10.0
LONGEST_SECONDS = 1.0
MOST_LOOKS = 1000


class _Report(NamedTuple):
    """A change of a request, in the order of the parameters of `report_requests`."""

    take: Take
    state: int
    note: str | None = None
    failed: int | None = None
    due: float | None = None
    error: str | None = None
    outcome: str | None = None
    result: Content | None = None
    messages: Sequence[Outgoing] = ()


class _Look(NamedTuple):
    """The result of the last take of a pool; see `take_requests` in `functions.sql`."""

    # The time of the next complete look, as `clock` counts.
    until: float
    since: float
    passed: list[int]


_NO_LOOK = _Look(0.0, 0.0, [0] * 10)


class PostgresqlRequests(RequestStore):
    """The requests of one app in a schema.

    :param check: a function that returns the size of a message, or raises an error if the broker
        cannot store the message.
    :param marks: a function that returns the marks that prove message ids; None without encryption.
    :param listen: see `RequestStore.listen`.
    """

    def __init__(
        self,
        tables: PostgresqlTables,
        check: Callable[[Outgoing], int],
        marks: Callable[[], IdMarks | None],
        listen: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._tables = tables
        self._sql = tables.sql
        self._read = tables.read
        self._check = check
        self._marks = marks
        self._listen = listen
        self._looks: dict[tuple[str, str], _Look] = {}

    def ask(self, requests: Sequence[NewRequest], connection: Any = None) -> list[bool]:
        size = check_requests(requests, MAX_STORED_BODY_BYTES)
        if not requests:
            return []
        if connection is None:
            ids = frozenset(_locked(each.id) for each in requests)
            work = GroupedWork(self._asked, requests, None, ids, _OF_REQUESTS)
            new: list[bool] = self._tables.writer.call(work, size)
            return new
        parameters = (self._tables.node, self._tables.app, *_arrays(requests), None)
        try:
            cursor = execute_within(connection, self._tables.address, self._sql(_ASK), parameters)
        except (PostgresqlError, PostgresqlRefusedError) as error:
            raise refusal(error) from error.__cause__
        return list(cursor.fetchone()[0])

    def _asked(
        self, connection: PostgresqlConnection, parts: list[Sequence[NewRequest]], lock_ms: int
    ) -> list[list[bool]]:
        requests = [each for part in parts for each in part]
        parameters = (None, self._tables.app, *_arrays(requests), lock_ms)
        (new,) = connection.execute(self._sql(_ASK), parameters).fetchone() or ((),)
        left = iter(new)
        return [list(islice(left, len(part))) for part in parts]

    def take(
        self, owner: str, pool: str, places: int, running: Collection[str], oldest: int = 0
    ) -> Taken:
        look = self._looks.get((owner, pool), _NO_LOOK)
        is_whole = clock() >= look.until
        parameters = {
            "app": self._tables.app, "owner": owner, "pool": pool, "running": list(running),
            "places": max(0, min(places, _MOST_PLACES)), "most": self._tables.fetches.most(),
            "since": look.since, "passed": look.passed, "whole": is_whole, "oldest": oldest,
        }  # fmt: skip

        def work(connection: PostgresqlConnection) -> list[Any]:
            with connection.cursor(binary=True) as cursor:
                return cursor.execute(self._sql(_TAKE), parameters).fetchall()

        rows = self._tables.writer.run(work, queues=frozenset({_locked(pool)}), told=frozenset())
        *rows, (*_, next_due, since, passed, spent) = rows
        left = look.until - clock()
        if is_whole:
            left = min(SPARED * spent, LONGEST_SECONDS)
        if next_due is not None and next_due > since:
            left = min(left, next_due - since)  # a delayed request has a smaller number
        if not is_whole and left > 0:
            next_due = since + left  # a complete look finds returned requests
        if len(self._looks) >= MOST_LOOKS:
            self._looks.clear()  # drops looks of former pools and registrations
        self._looks[owner, pool] = _Look(clock() + left, since, passed)
        if next_due is not None:
            next_due += time.time() - since  # the server's clock may differ
        requests = tuple(taken_of(owner, pool, *row[:10]) for row in rows if row[1] is not None)
        marks = {row[0]: row[10] for row in rows if row[10] is not None}
        return Taken(requests, marks, next_due)

    def note(
        self, take: Take, state: int, note: str | None, messages: Sequence[Outgoing] = ()
    ) -> bool:
        text = storable_text(note)
        if state == IN_STEPS:
            self._looks.clear()  # its steps may be over, so the next take must see it
            values = (take.id, take.owner, take.number, text)
            return bool(self._change(_SUSPEND, values, frozenset(), {_locked(take.id)}))
        return self._report(_Report(take, state, text, messages=messages))

    def end(
        self,
        take: Take,
        outcome: str,
        result: Content | None = None,
        error: str | None = None,
        messages: Sequence[Outgoing] = (),
        failed: int | None = None,
    ) -> bool:
        error = storable_text(error)
        size = check_content(f"of request {take.id}", result, MAX_STORED_BODY_BYTES)
        if not take.owner and outcome in ("cancelled", "done"):
            return self._end(take, outcome, error, result, messages, size)
        report = _Report(
            take,
            OVER,
            failed=failed,
            error=error,
            outcome=outcome,
            result=result,
            messages=messages,
        )
        return self._report(report, size)

    def put_back(self, take: Take, failed: int, seconds: float, error: str | None) -> bool:
        report = _Report(take, WAITING, failed=failed, due=-seconds, error=storable_text(error))
        return self._report(report, told=_OF_REQUESTS)

    def _report(self, report: _Report, size: int = 0, told: frozenset[str] = frozenset()) -> bool:
        size += sum(map(self._check, report.messages))
        queues = frozenset(message.queue for message in report.messages)
        locked = queues | {_locked(report.take.id)}
        told |= _announced(report.messages)
        work = GroupedWork(self._reported, report, report.take.id, locked, told)
        valid = bool(self._tables.writer.call(work, size))
        if report.state == WAITING:
            self._looks.clear()  # the next take must see the request
        return valid

    def _reported(
        self, connection: PostgresqlConnection, reports: list[_Report], lock_ms: int
    ) -> list[bool]:
        takes, states, notes, failures, dues, errors, outcomes, results, _ = zip(
            *reports, strict=True
        )
        contents = [(None, None) if each is None else each for each in results]
        columns = (
            *zip(*takes, strict=True), states, notes, failures, dues, errors, outcomes,
            [headers for _, headers in contents], [body for body, _ in contents],
        )  # fmt: skip
        places = [
            place for place, report in enumerate(reports, 1) for _ in range(len(report.messages))
        ]
        messages = [message for report in reports for message in report.messages]
        arrays = arrays_of(messages, self._marks()) if messages else (None,) * 8
        parameters = (self._tables.app, *map(list, columns), places, *arrays, lock_ms)
        (valid,) = connection.execute(self._sql(_REPORT), parameters).fetchone() or ([],)
        return list(valid)

    def _end(
        self,
        take: Take,
        outcome: str,
        why: str | None,
        result: Content | None,
        messages: Sequence[Outgoing],
        size: int,
    ) -> bool:
        """End a request without an owner, which a sender's role may also do."""
        size += sum(map(self._check, messages))
        arrays = arrays_of(messages, self._marks()) if messages else (None,) * 8
        locked = frozenset(message.queue for message in messages) | {_locked(take.id)}
        body, headers = result or (None, None)
        values = (take.id, take.number, outcome, why, headers, body, *arrays)
        return bool(self._change(_END, values, _announced(messages), locked, size))

    def retry(self, id: str, forget: Collection[str] = ()) -> bool:
        check_request_text("the id of a request", id)
        self._looks.clear()
        return bool(self._change(_RETRY, (id, [*forget]), _OF_REQUESTS, {_locked(id)}))

    def mark(self, id: str, mark: str, asked: str | None = None) -> bool:
        check_request_text("the id of a request", id)
        check_request_text("the mark of a request", mark)
        return bool(self._change(_MARK, (id, mark, asked), _OF_REQUESTS, {_locked(id)}))

    def give_back(self, owner: str) -> int:
        self._looks.clear()
        return int(self._change(_GIVE_BACK, (owner,), _OF_REQUESTS, {_locked(owner)}))

    def expire(self, failed: Sequence[str] = ()) -> int:
        for id in failed:
            check_request_text("the id of a request", id)
        if failed:
            locked = frozenset(map(_locked, failed))
            return int(self._change(_DISCARD, ([*failed],), frozenset(), locked))
        return int(self._change(_EXPIRE, (), frozenset(), {_locked("")}))

    def owners(self) -> list[str]:
        return [owner for (owner,) in self._read(_OWNERS)]

    def find(self, id: str, *, whole: bool = True) -> RequestRecord | None:
        check_request_text("the id of a request", id)
        rows = self._read(_FIND if whole else _FIND_BRIEF, id=id)
        return record_of(*rows[0]) if rows else None

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
            check_request_text("the id of a request", of)
            rows = self._read(_LATE if late else _FAMILY, id=of, limit=limit)
            return [record_of(*row) for row in rows]
        numbers = ", ".join(map(str, sorted(map(int, states or (WAITING, RUNNING, PAUSED, OVER)))))
        condition = f"state IN ({numbers})"
        if outcome is not None:  # a constant lets the planner use the index of failures
            condition = f"state = {OVER} AND outcome = '{OUTCOMES[OUTCOMES.index(outcome)]}'"
            if outcome == FAILED:
                condition += " AND parent IS NULL"
        query = _RECORDS.replace("{condition}", condition)
        query = query.replace("{order}", "DESC" if newest else "ASC")
        return [record_of(*row) for row in self._read(query, pool=pool, limit=limit)]

    def due(self, owner: str = "", running: Collection[str] = ()) -> dict[str, float]:
        rows = self._read(_DUE, owner=owner, running=[*running])
        now = time.time()
        return {pool: now + (seconds or 0.0) for pool, seconds in rows}

    def counts(self) -> dict[str, PoolCounts]:
        return {pool: PoolCounts(*counts) for pool, *counts in self._read(_COUNTS)}

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        return self._listen(wake)

    def _change(
        self,
        query: str,
        values: tuple[Any, ...],
        told: frozenset[str],
        locked: Collection[str],
        size: int = 0,
    ) -> Any:
        """Return the only value of a statement that changes data of the app."""
        parameters = (self._tables.app, *values)

        def work(connection: PostgresqlConnection) -> Any:
            (value,) = connection.execute(self._sql(query), parameters).fetchone() or (None,)
            return value

        return self._tables.writer.run(work, size, frozenset(locked), told)


def _locked(name: str) -> str:
    """Return the name of a lock that a call may wait for; it is never the name of a queue."""
    return f"/{name}"


def _announced(messages: Sequence[Outgoing]) -> frozenset[str]:
    """Return the queues of messages; `UNKNOWN` if some messages may be delayed."""
    if any(message.terms is not None for message in messages):
        return UNKNOWN
    return frozenset(message.queue for message in messages)


def _arrays(requests: Sequence[NewRequest]) -> tuple[list[Any] | None, ...]:
    """Return the arrays for `ask_requests`."""
    rows = [
        (each.pool, each.id, each.priority, each.due, each.reply, each.keep_seconds, each.digest,
         each.content[1], each.content[0])
        for each in requests
    ]  # fmt: skip
    parents = [each.parent for each in requests]
    deadlines = [each.deadline for each in requests]
    states = [PAUSED if each.paused else WAITING for each in requests]
    rare = [each if any(each) else None for each in (parents, deadlines, states)]
    return (*map(list, zip(*rows, strict=True)), *rare)
