"""Read queues. One native thread makes all fetches of a process over one connection.

The thread combines fetches that arrive while it is busy into one query. A thousand queues with one
new message each need only a few round trips.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from qdo.brokers.grouped_calls import GroupedCall, GroupedCalls
from qdo.brokers.postgresql.writer import PostgresqlWriter
from qdo.encoding import LEFT_ON_SERVER, MAX_STORED_BODY_BYTES, unreadable
from qdo.postgresql.session import PostgresqlConnection, PostgresqlSession
from qdo.postgresql.url import SchemaAddress, connection_name

T = TypeVar("T")
Row: TypeAlias = tuple[int, bytes, "str | None", "str | None"]

# The maximum size of all bodies in one response. The first body of a queue may be larger.
FETCH_BYTES = 32 * 1024 * 1024
# The maximum number of fetches in one query. If each first body has the default
# `Broker.max_read_bytes` of 4 MiB, a response has 256 MiB. Bodies of 64 MiB, which a sender may
# store, would exceed the worker's memory.
MAX_FETCHES = 64
# The time between two lists of the partitions. The last span includes all newer partitions.
LIST_SECONDS = 60.0
END = 2**63 - 1

# The largest values that the schema stores, in bytes. An altered row may have a larger value. The
# server does not return this value, because it could exceed the memory of the process. The check
# takes 0.07 us for each row.
_LIMITS = ("body", MAX_STORED_BODY_BYTES), ("key", 4000), ("headers", 128 * 1024)
_TOO_LARGE = " OR ".join(f"octet_length({name}) > {most}" for name, most in _LIMITS)
_UNREAD = unreadable("it exceeds the limits of the schema")
_COLUMNS = f"""position,
    CASE WHEN {_TOO_LARGE} OR octet_length(body) > %(most)s THEN '' ELSE body END AS body,
    CASE WHEN {_TOO_LARGE} THEN NULL ELSE key END AS key,
    CASE WHEN {_TOO_LARGE} THEN '{_UNREAD}'
        WHEN octet_length(body) > %(most)s THEN '{LEFT_ON_SERVER}' ELSE headers END AS headers"""

_ONE = """
SELECT {columns} FROM {schema}.messages
WHERE queue = (SELECT id FROM {schema}.queues WHERE app = %(app)s AND name = %(name)s)
  AND position > %(first)s::bigint AND position <= %(last)s::bigint
  AND position > greatest(%(after)s::bigint, (
      SELECT trimmed FROM {schema}.queues WHERE app = %(app)s AND name = %(name)s))
ORDER BY position LIMIT least(%(limit)s, greatest(1, {bytes} / (
    SELECT greatest(1, largest) FROM {schema}.queues WHERE app = %(app)s AND name = %(name)s)))
"""
_MANY = """
SELECT place, position, body, key, headers
FROM unnest(%(names)b::text[], %(afters)b::bigint[], %(limits)b::bigint[])
    WITH ORDINALITY AS wanted(name, after, most, place)
JOIN {schema}.queues ON app = %(app)s AND queues.name = wanted.name
CROSS JOIN LATERAL (
    SELECT {columns} FROM {schema}.messages
    WHERE queue = queues.id AND position > %(first)s::bigint AND position <= %(last)s::bigint
      AND position > greatest(wanted.after, queues.trimmed)
    ORDER BY position
    LIMIT least(
        wanted.most,
        greatest(1, {bytes} / %(count)s::integer / greatest(1, queues.largest)))
) AS found
ORDER BY place, position
"""
_PLACE = itemgetter(0)
_ROW = itemgetter(1, 2, 3, 4)
Work: TypeAlias = "Fetch | Callable[[PostgresqlConnection], Any]"


class Fetch(NamedTuple):
    queue: str
    after: int
    limit: int


class Fetches(GroupedCalls[Work]):
    """The reads of one process for one app; `most` returns `Broker.max_read_bytes`.

    :param check: a function of each new connection, which raises an error for an unusable schema.
    """

    def __init__(
        self,
        address: SchemaAddress,
        app: str,
        most: Callable[[], int],
        check: Callable[[PostgresqlConnection], None],
    ) -> None:
        super().__init__("reader")
        self.most = most
        self._app = app
        self._address = address
        name = connection_name(app, "reader")
        self._session = PostgresqlSession(address, check, name=name)
        self._one = _ONE.format(schema=address.schema, bytes=FETCH_BYTES, columns=_COLUMNS)
        self._many = _MANY.format(schema=address.schema, bytes=FETCH_BYTES, columns=_COLUMNS)
        self._list = f"SELECT {address.schema}.spans(0)"
        self._listed: float | None = None
        self._spans: list[int] = []
        self.start()

    def run(self, work: Callable[[PostgresqlConnection], T]) -> T:
        result: T = self.call(work)
        return result

    # --- on the reading thread --------------------------------------------------------

    def spans(self, connection: PostgresqlConnection, after: int) -> list[tuple[int, int]]:
        """Divide the positions after `after`, because a query of one span opens few partitions."""
        now = time.monotonic()
        if self._listed is None or now - self._listed > LIST_SECONDS:
            self._spans = [last for (last,) in connection.execute(self._list)][:-1]
            self._listed = now
        later = self._spans[bisect_right(self._spans, after) :]
        return list(itertools.pairwise([after, *later, END]))

    @property
    def prepare(self) -> bool | None:
        """Whether to prepare statements. Prepared plans would open all partitions."""
        return False if self._spans else None

    def release(self) -> None:
        self._session.close()

    def handle(self, calls: list[GroupedCall[Work]]) -> None:
        fetches = [call for call in calls if isinstance(call.work, Fetch)]
        for start in range(0, len(fetches), MAX_FETCHES):
            self._fetch(fetches[start : start + MAX_FETCHES])
        for call in calls:
            if not isinstance(call.work, Fetch):
                self._run_one(call, call.work)

    def _fetch(self, calls: list[GroupedCall[Work]]) -> None:
        wanted: list[Fetch] = [call.work for call in calls]  # type: ignore[misc]
        try:
            found = self._session.run(lambda connection: self._fetch_spans(connection, wanted))
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            for call in calls:
                call.fail(error)
            return
        for call, rows in zip(calls, found, strict=True):
            call.finish(rows)

    def _fetch_spans(
        self, connection: PostgresqlConnection, wanted: Sequence[Fetch]
    ) -> Sequence[list[Row]]:
        found: list[list[Row]] = [[] for _ in wanted]
        for first, last in self.spans(connection, min(fetch.after for fetch in wanted)):
            empty = [at for at, rows in enumerate(found) if not rows and wanted[at].after < last]
            fetches = [wanted[at] for at in empty]
            if fetches:
                fetch = self._fetch_one if len(fetches) == 1 else self._fetch_many
                for at, rows in zip(empty, fetch(connection, fetches, first, last), strict=True):
                    found[at] = rows
        return found

    def _fetch_one(
        self, connection: PostgresqlConnection, wanted: Sequence[Fetch], first: int, last: int
    ) -> Sequence[list[Row]]:
        (fetch,) = wanted
        parameters = {
            "app": self._app, "name": fetch.queue, "after": fetch.after, "limit": fetch.limit,
            "first": max(first, fetch.after), "last": last, "most": self.most(),
        }  # fmt: skip
        with connection.cursor(binary=True) as cursor:
            return [cursor.execute(self._one, parameters, prepare=self.prepare).fetchall()]

    def _fetch_many(
        self, connection: PostgresqlConnection, wanted: Sequence[Fetch], first: int, last: int
    ) -> Sequence[list[Row]]:
        parameters = {
            "app": self._app,
            "names": [fetch.queue for fetch in wanted],
            "afters": [fetch.after for fetch in wanted],
            "limits": [fetch.limit for fetch in wanted],
            "count": len(wanted),
            "first": first,
            "last": last,
            "most": self.most(),
        }
        with connection.cursor(binary=True) as cursor:
            rows = cursor.execute(self._many, parameters, prepare=self.prepare).fetchall()
        # Avoid a loop over the rows, because it would take as long as reading them.
        ends = [bisect_right(rows, place, key=_PLACE) for place in range(len(wanted) + 1)]
        return [list(map(_ROW, rows[start:end])) for start, end in itertools.pairwise(ends)]

    def _run_one(
        self, call: GroupedCall[Work], work: Callable[[PostgresqlConnection], Any]
    ) -> None:
        try:
            call.finish(self._session.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            call.fail(error)


class PostgresqlReader:
    __slots__ = ("_after", "_fetches", "_queue")

    def __init__(self, fetches: Fetches, queue: str, after: int) -> None:
        self._fetches = fetches
        self._queue = queue
        self._after = after

    def fetch(self, limit: int) -> Sequence[Row]:
        """Return the next rows; fewer than `limit` if their bodies need too much memory."""
        rows: Sequence[Row] = self._fetches.call(Fetch(self._queue, self._after, limit))
        if rows:
            self._after = rows[-1][0]
        return rows


@dataclass(frozen=True, slots=True)
class PostgresqlTables:
    """The tables of one app in a schema. Safe to use from several threads."""

    fetches: Fetches
    writer: PostgresqlWriter
    address: SchemaAddress
    app: str
    # The 48-bit node of message ids.
    node: int

    def sql(self, text: str) -> str:
        return text.format(schema=self.address.schema)

    def read(self, query: str, **values: Any) -> list[Any]:
        """Return the rows of a query for this app, given its other parameters."""
        statement = self.sql(query)
        parameters = {"app": self.app, **values}

        def work(connection: PostgresqlConnection) -> list[Any]:
            with connection.cursor(binary=True) as cursor:
                return cursor.execute(statement, parameters).fetchall()

        return self.fetches.run(work)
