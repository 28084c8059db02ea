"""The PostgreSQL broker: queues of one app in a schema that processes on many hosts share.

A message is on the server's disk when `send()` returns its id. See `schema` for the order of
messages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from qdo.broker_errors import SchemaNewerError
from qdo.brokers.base import Outgoing
from qdo.brokers.catalog import NO_BACKLOG, Backlog, QueueCatalog
from qdo.brokers.grouped_calls import GroupCommitBroker
from qdo.brokers.outgoing import checked_size
from qdo.brokers.postgresql.letters import PostgresqlDeadLetters, PostgresqlDelayedMessages
from qdo.brokers.postgresql.listener import SLOW_SECONDS, NotificationListener
from qdo.brokers.postgresql.reader import END, Fetches, PostgresqlReader, PostgresqlTables
from qdo.brokers.postgresql.requests import PostgresqlRequests
from qdo.brokers.postgresql.streams import PostgresqlStreams
from qdo.brokers.postgresql.writer import (
    ARRAYS,
    UNKNOWN,
    Change,
    PostgresqlWriter,
    Work,
    arrays_of,
    execute_within,
    send_work,
)
from qdo.brokers.streams import check_deletable
from qdo.encryption.marks import IdMarks
from qdo.errors import QueueNotEmptyError, UnreachableError
from qdo.jobs.retry import PolicyInForce
from qdo.positions import format_position
from qdo.postgresql.schema import check_format, check_server
from qdo.postgresql.session import PostgresqlConnection
from qdo.postgresql.url import SchemaAddress
from qdo.queues import check_queue_name
from qdo.system.clock import clock

# The maximum number of messages to count, which takes 0.2 s. A larger backlog is approximate.
COUNTED = 1_000_000
# The maximum number of queues in one query. A query about all queues may take 30 s for 150 million
# messages, and the server would seem to be down.
MAX_QUEUES = 1000

_NEW_NAMES = """
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
    ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())::text::bigint),
    ARRAY(SELECT name FROM {schema}.queues WHERE app = %(app)s
        AND (xid >= %(next)s AND (xid < pg_snapshot_xmax(pg_current_snapshot())::text::bigint
            OR %(next)s = 0) OR xid = ANY (%(running)s::bigint[])) ORDER BY name)
"""
_COUNT = "SELECT count(*) FROM {schema}.queues WHERE app = %s"
_HIDDEN = "SELECT queue FROM {schema}.streams WHERE app = %s AND hidden"
_SPAN = """queue = queues.id
        AND position > %(first)s::bigint AND position <= %(last)s::bigint"""
_BACKLOGS = f"""
SELECT queues.name, trimmed,
    (SELECT position FROM {{schema}}.messages WHERE {_SPAN} ORDER BY position DESC LIMIT 1),
    (SELECT position FROM {{schema}}.messages WHERE {_SPAN}
        AND position > greatest(asked.after, trimmed) ORDER BY position LIMIT 1),
    (SELECT count(*) FROM (SELECT FROM {{schema}}.messages WHERE {_SPAN}
        AND position > greatest(asked.after, trimmed) LIMIT {{most}}) AS counted),
    (SELECT count(*) FROM {{schema}}.delayed WHERE queue = queues.id AND %(newest)s)
FROM unnest(%(names)b::text[], %(afters)b::bigint[]) AS asked(name, after)
JOIN {{schema}}.queues ON app = %(app)s AND queues.name = asked.name
"""  # noqa: S608 - constants

# The number of locks that a statement takes for each partition: on the table and its indexes.
LOCKS = 3
_PARTITIONS = """
SELECT count(*), (min(substring(relname FROM '[0-9]+$')::bigint) + 1) * min(partition_ticks),
    current_setting('max_locks_per_transaction')::bigint, (
        current_setting('max_connections')::bigint
        + current_setting('max_prepared_transactions')::bigint)
FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid CROSS JOIN {schema}.about
WHERE inhparent = '{schema}.messages'::regclass
"""
# The number of connections for ordinary roles; PostgreSQL 16 may reserve some for other roles.
_MOST = """
SELECT most - current_setting('superuser_reserved_connections')::integer
    - coalesce(current_setting('reserved_connections', true)::integer, 0), most,
    (SELECT count(usesysid) FROM pg_stat_activity)
FROM current_setting('max_connections') AS named(text), CAST(text AS integer) AS most
"""
# The share of connections in use from which `qdo doctor` and starting workers warn.
FULL_SHARE = 0.8
# The age at which `qdo doctor` reports an open transaction. Only some roles can see the ages of
# transactions of other roles.
OPEN_SECONDS = 60.0
_OPEN = """
SELECT pid, usename, round(extract(epoch FROM clock_timestamp() - xact_start))
FROM pg_stat_activity AS one WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND xact_start < clock_timestamp() - %s * interval '1 s' AND EXISTS (
        SELECT FROM pg_locks JOIN pg_class ON pg_class.oid = relation
        WHERE pg_locks.pid = one.pid AND relnamespace = '{schema}'::regnamespace)
ORDER BY xact_start LIMIT 3
"""
_REQUEST_ROWS = """
SELECT pg_stat_get_live_tuples(oid), pg_stat_get_dead_tuples(oid)
FROM (SELECT '{schema}.requests'::regclass AS oid) AS named
"""
_OLDEST = """
SELECT app, name, (SELECT position FROM {schema}.messages WHERE queue = queues.id
    AND position < %s::bigint AND position > trimmed ORDER BY position LIMIT 1) AS oldest
FROM {schema}.queues ORDER BY oldest LIMIT 1
"""
# The minimum time between two attempts of a process to drop partitions.
DROP_SECONDS = 10.0
_SECOND = 10_000_000


class PostgresqlCatalog(QueueCatalog):
    """The queues of one app in a schema. Safe to use from several threads."""

    def __init__(self, tables: PostgresqlTables) -> None:
        self._tables = tables
        self._fetches = tables.fetches
        self._sql = tables.sql
        self._known: set[str] = set()
        self._sorted: list[str] = []
        self._next_xid = 0
        self._running: list[int] = []

    def names(self) -> list[str]:
        """Return the names of all queues; read only new names from the server."""
        names = self.names_to_show()
        hidden = self._fetches.run(self._read_hidden)  # after the names, so none is missing
        return [name for name in names if name not in hidden]

    def names_to_show(self) -> list[str]:
        return self._fetches.run(self._read_names)

    def _read_hidden(self, connection: PostgresqlConnection) -> set[str]:
        return {name for (name,) in connection.execute(self._sql(_HIDDEN), (self._tables.app,))}

    def _read_names(self, connection: PostgresqlConnection) -> list[str]:
        count = len(self._known) + self._add_new(connection)
        (total,) = connection.execute(self._sql(_COUNT), (self._tables.app,)).fetchone() or (0,)
        # Either a worker deleted a queue, or a crashed server assigned an earlier transaction id
        # again to a new queue.
        if total != count:
            self._known = set()
            self._sorted = []
            self._next_xid = 0
            self._running = []
            self._add_new(connection)
        if len(self._sorted) != len(self._known):
            self._sorted = sorted(self._known)
        return self._sorted.copy()

    def _add_new(self, connection: PostgresqlConnection) -> int:
        """Add the queues of transactions that have become visible; return their number."""
        before = len(self._known)
        seen = {"app": self._tables.app, "next": self._next_xid, "running": self._running}
        found = connection.execute(self._sql(_NEW_NAMES), seen).fetchone()
        if found is not None:
            self._next_xid, self._running, names = found
            self._known.update(names)
        return len(self._known) - before

    def claim_app(self, fleet: str, root: str) -> str:
        query = self._sql("SELECT {schema}.claim_app(%s, %s, %s)")
        parameters = (self._tables.app, fleet, root)
        row = self._tables.writer.run(lambda sql: sql.execute(query, parameters).fetchone())
        (found,) = row or (fleet,)
        return str(found)

    def request_rows(self) -> tuple[int, int]:
        query = self._sql(_REQUEST_ROWS)
        return self._fetches.run(lambda each: each.execute(query).fetchone() or (0, 0))

    def config_warnings(self, policies: Mapping[str, PolicyInForce]) -> list[str]:
        return self._fetches.run(self._open) + self._fetches.run(self._warnings)

    def connection_warnings(self, concurrency: Sequence[int]) -> list[str]:
        # qdo does not know how many connections each job opens to this server, if any.
        asked = self._fetches.run(lambda sql: sql.execute(_MOST).fetchone())
        most, limit, used = asked or (0, 0, 0)
        jobs = sum(concurrency)
        warnings = []
        if used > FULL_SHARE * most:
            warnings = [
                f"{used} of the {most} connections of the PostgreSQL server are in use"
                f" (max_connections {limit}): without a free one, senders and commands fail and"
                " workers wait; `application_name` in pg_stat_activity names the users;"
                " raise max_connections, or run fewer processes"
            ]
        if jobs <= most:
            return warnings
        parts = (f"{count} x {places}" for places, count in Counter(concurrency).items())
        return [
            *warnings,
            f"{jobs} jobs may run at once (processes x concurrency: {' + '.join(parts)}), and the"
            f" PostgreSQL server has {most} connections for all roles (max_connections {limit}):"
            " if each job opens its own there, some fail; let the jobs of a process share a pool"
            " of connections, lower concurrency, or raise max_connections",
        ]

    def _open(self, connection: PostgresqlConnection) -> list[str]:
        return [
            f"a transaction of role {role} (process {pid} of the server) is open for {age:g} s, and"
            f" may hold locks that senders and workers wait for: commit it, or end it with"
            f" pg_terminate_backend({pid}); set idle_in_transaction_session_timeout for the role"
            for pid, role, age in connection.execute(self._sql(_OPEN), (OPEN_SECONDS,))
        ]

    def _warnings(self, connection: PostgresqlConnection) -> list[str]:
        found = connection.execute(self._sql(_PARTITIONS)).fetchone()
        count, end, locks, sessions = found or (0, 0, 0, 0)
        most = locks * sessions // LOCKS
        if count < most / 2:
            return []
        oldest = connection.execute(self._sql(_OLDEST), (end,)).fetchone()
        app, queue, position = oldest or ("", "", None)
        reason = f"table {self._tables.address.schema}.messages has {count} partitions"
        if position is not None:
            time = format_position(position)
            reason += f", because queue {queue} of app {app} keeps its message of {time}"
        return [
            f"{reason}; at about {most}, a statement over all of them, such as a dump, fills the"
            f" server's lock table: process or skip the message, or raise"
            f" max_locks_per_transaction, got {locks}"
        ]

    def backlog(self, queue: str, after: int) -> Backlog:
        return self.backlogs({queue: after})[queue]

    def backlogs(self, after: Mapping[str, int]) -> dict[str, Backlog]:
        found = dict.fromkeys(after, NO_BACKLOG)
        names = list(after)
        for start in range(0, len(names), MAX_QUEUES):
            part = {name: after[name] for name in names[start : start + MAX_QUEUES]}
            found.update(self._fetches.run(partial(self._read, part)))
        return found

    def _read(self, wanted: dict[str, int], connection: PostgresqlConnection) -> dict[str, Backlog]:
        """Add up the backlogs of spans of partitions, from the newest to the oldest span."""
        backlogs = _BACKLOGS.format(schema=self._tables.address.schema, most=COUNTED + 1)
        found: dict[str, Backlog] = {}
        for first, last in reversed(self._fetches.spans(connection, 0)):
            parameters = {
                "app": self._tables.app, "names": list(wanted), "afters": list(wanted.values()),
                "first": first, "last": last, "newest": last == END,
            }  # fmt: skip
            rows = connection.execute(backlogs, parameters, prepare=self._fetches.prepare)
            for queue, trimmed, head, oldest, count, delayed in rows:
                newer = found.get(queue, NO_BACKLOG)
                head = max(newer.head, head or 0, trimmed)
                count += newer.count
                found[queue] = Backlog(
                    count=min(count, COUNTED),
                    oldest=newer.oldest if oldest is None else oldest,
                    head=head,
                    delayed=newer.delayed + delayed,
                    approximate=newer.approximate or count > COUNTED,
                )
                if first <= (max(trimmed, wanted[queue]) if head > trimmed else trimmed):
                    del wanted[queue]
            if not wanted:
                break
        return found


class PostgresqlBroker(GroupCommitBroker):
    """Queues of one app in a schema.

    Safe to use from several threads, or from greenlets once gevent has patched the process.
    """

    capabilities = replace(GroupCommitBroker.capabilities, checks_config=True)
    _writer: PostgresqlWriter

    def __init__(self, address: SchemaAddress, app: str) -> None:
        self._address = address
        self._app = app
        schema = address.schema
        self._trim = f"SELECT {schema}.trim(%s, %s, %s, %s)"
        self._drop = f"SELECT {schema}.drop_partitions()"
        self._delete = f"SELECT * FROM {schema}.delete_queue(%s, %s, %s)"  # noqa: S608 - the address allows a-z, 0-9 and _
        self._dropped = time.monotonic()
        self.checked_size = partial(checked_size, set(), nul=False)
        self._listeners: list[NotificationListener] = []
        self._fetches = Fetches(address, app, lambda: self.max_read_bytes, self._check)
        try:
            node = f"SELECT node FROM {schema}.about"  # noqa: S608 - the address allows a-z, 0-9 and _
            (self.id_node,) = self._fetches.run(
                lambda connection: connection.execute(node).fetchone() or (0,)
            )
        except BaseException:
            self._fetches.close()
            raise
        self._writer = PostgresqlWriter(address, app, self._limit, self._check)
        tables = PostgresqlTables(self._fetches, self._writer, address, app, self.id_node)
        self.catalog = PostgresqlCatalog(tables)
        self.delayed = PostgresqlDelayedMessages(tables)
        self.dead_letters = PostgresqlDeadLetters(tables)
        self.streams = PostgresqlStreams(tables)
        self.stream_of = self.streams.stream_of
        self.requests = PostgresqlRequests(
            tables, self.checked_size, self._marks, self._listen_for_requests
        )

    def _check(self, connection: PostgresqlConnection) -> None:
        """Raise an error if this version of qdo cannot use the server or the schema."""
        check_server(connection, self._address)
        try:
            check_format(connection, self._address)
        except SchemaNewerError as error:
            self.on_unusable(error)
            raise

    def _limit(self) -> int | None:
        return self.max_queues if self.sets_limit else None

    def send_within(self, connection: Any, messages: Sequence[Outgoing]) -> list[str]:
        for message in messages:
            self.checked_size(message)
        if not messages:
            return []
        statement = f"SELECT {self._address.schema}.stage(%s, %s, {ARRAYS})"
        arrays = arrays_of(messages, self._marks(), with_ids=True)
        execute_within(connection, self._address, statement, (self.id_node, self._app, *arrays))
        ids: list[str] = arrays[4]
        return ids

    def _append(self, messages: Sequence[Outgoing]) -> Work:
        return messages

    def _send(self, messages: Sequence[Outgoing]) -> Work:
        work = send_work(self._address.schema, self._app, messages, self._marks())
        return Change(work, frozenset(message.queue for message in messages), UNKNOWN)

    def _marks(self) -> IdMarks | None:
        return None if self.dead_letters.marks is None else self.dead_letters.marks()

    def reader(self, queue: str, after: int) -> PostgresqlReader:
        return PostgresqlReader(self._fetches, check_queue_name(queue), after)

    def was_away(self, since: float) -> bool:
        asked = clock()
        try:
            self._fetches.run(lambda connection: connection.execute("SELECT 1"))
        except UnreachableError:
            return True
        # A server that was frozen, or that restarts, responds only after the outage.
        was_slow = clock() - asked > SLOW_SECONDS
        return was_slow or any(each.answers.were_missing(since) for each in self._listeners)

    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        listener = NotificationListener(self._address, self._app, wake, self._check)
        self._listeners.append(listener)
        return listener.stop

    def _listen_for_requests(self, wake: Callable[[], None]) -> Callable[[], None]:
        for listener in self._listeners:
            if (stop := listener.listen_for_requests(wake)) is not None:
                return stop
        self._listeners.append(NotificationListener(self._address, self._app, None, self._check))
        return self._listen_for_requests(wake)

    def trim(self, queue: str, last: int, older_than: float) -> int:
        parameters = (self._app, queue, last, round(older_than * _SECOND))
        (count,) = self._execute(self._trim, parameters, queue)
        now = time.monotonic()
        if now - self._dropped > DROP_SECONDS:
            self._dropped = now
            self._execute(self._drop, ())
        return int(count)

    def delete_queue(self, queue: str, last: int) -> None:
        # Check outside the transaction, because a deletable shard stays deletable.
        check_deletable(queue, self.streams)
        counts = self._execute(self._delete, (self._app, queue, last), queue)
        if any(counts):
            waiting, delayed, dead = counts
            raise QueueNotEmptyError(
                queue=queue, waiting=waiting, delayed=delayed, dead_letters=dead
            )

    def _execute(
        self, statement: str, parameters: tuple[Any, ...], queue: str | None = None
    ) -> tuple[Any, ...]:

        def work(connection: PostgresqlConnection) -> tuple[Any, ...]:
            return connection.execute(statement, parameters).fetchone() or ()

        queues = UNKNOWN if queue is None else frozenset({queue})
        return self._writer.run(work, queues=queues)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._writer.close()
        self._fetches.close()
