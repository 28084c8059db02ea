"""The tables of a coordinator in PostgreSQL: znodes, sessions, and recent changes.

- A write transaction locks the only row of `tree`. The transaction takes the zxid after the newest
  change, so zxids have the order of the commits. A lock creates no row version, but a heartbeat
  does. If another transaction has been open for 80,000 heartbeats, a write takes 2 ms longer.
- A client that is suspended during a write would hold the lock. The server ends its transaction
  after `IDLE_SECONDS`, but only between two messages of the protocol. So a client sends all locking
  statements in one message. A write takes two messages. The first message locks and reads; the
  second message writes and commits. If a client is suspended while it receives a large answer, the
  server cuts it off after the same time (`tcp_user_timeout`).
- Each write sends a notification. Notifications have no content, because every role may send them.
  Clients also read the log of changes without a notification.
- A heartbeat is a counter. Other processes use their own clocks to measure how long the counter
  stays the same, so an operator may set the server's clock. A heartbeat need not be durable,
  because after a crash of the server its value differs from the last value that others saw.
- Reads for operators omit sessions that are silent by the server's clock.
- `age` names the server, its timeline and the table `tree`. The age changes when a standby takes
  over or an operator restores a dump. Commits may then be missing. So no session begins until the
  earlier sessions of all workers have ended, and no lease of a lost claim is still valid. Zxids
  continue at a higher multiple of `EPOCH`, so no fence occurs twice. When the first process writes
  to the new server, the earlier server no longer acknowledges writes. From this moment, the
  processes count the silence of the earlier sessions in the table. A session without a worker keeps
  its nodes for its own timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import psycopg
from kazoo.exceptions import ConnectionDropped
from psycopg import errors
from psycopg.pq import TransactionStatus

from qdo.broker_errors import PostgresqlRightsError, PostgresqlUnsuitableError
from qdo.coordination.sql.store import (
    MAX_TIMEOUT_SECONDS,
    MIN_TIMEOUT_SECONDS,
    UNDONE,
    Operations,
    SessionRow,
    StoredState,
    folder_of,
    key_of,
)
from qdo.coordination.sql.tree import Event, TreeNode, is_valid, paths_of
from qdo.postgresql.schema import check_format
from qdo.postgresql.session import PostgresqlConnection, connect, translated
from qdo.postgresql.url import SchemaAddress, connection_name
from qdo.system.clock import clock

# The number of zxids in one age. At a thousand changes a second, they last for 34 years.
EPOCH = 2**40
# The time for which the server waits for a transaction's next statement; clients wait longer.
IDLE_SECONDS = 1.0
# The time between looks for changes without a notification.
LOOK_SECONDS = 1.0
# The pause between two looks, because each write in a large fleet notifies every process.
REST_SECONDS = 0.005
KEPT_CHANGES = 10_000
_TRIM_EVERY = 64
_COUNT_MILLISECONDS = 400
_OPEN = TransactionStatus.INTRANS, TransactionStatus.INERROR
# The last age that this process found, by schema.
_ages: dict[SchemaAddress, str] = {}
log = logging.getLogger(__name__)
_SET_UP = """
SET default_transaction_isolation = 'read committed';
SET idle_session_timeout = 0;
SET idle_in_transaction_session_timeout = '{idle}ms';
SET tcp_user_timeout = '{idle}ms';
SET statement_timeout = '{answer}ms';
SET lock_timeout = '{answer}ms';
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off';
LISTEN "{channel}"
"""
_SERVER = """
SELECT pg_backend_pid(), pg_is_in_recovery(), concat(system_identifier, ':',
        CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END,
        ':', '{schema}.tree'::regclass::oid),
    (SELECT bool_and(has_table_privilege('{schema}.' || part, 'SELECT'))
        FROM unnest(ARRAY['tree', 'znodes', 'sessions', 'changes']) AS part),
    has_table_privilege('{schema}.tree', 'UPDATE') AND
        (SELECT bool_and(has_table_privilege('{schema}.' || part, may))
        FROM unnest(ARRAY['znodes', 'sessions', 'changes']) AS part,
            unnest(ARRAY['INSERT', 'UPDATE', 'DELETE']) AS may)
FROM pg_control_system()
"""
# The upper limit of zxids, because the successors of larger numbers would not fit.
_END = 2**62
_GRANTED = f"""
    least(greatest(%s, {MIN_TIMEOUT_SECONDS * 1000:.0f}), {MAX_TIMEOUT_SECONDS * 1000:.0f})"""
_TIMEOUT = _GRANTED % "timeout"
_STATE = f"""
SELECT coalesce((SELECT zxid FROM {{schema}}.changes WHERE zxid < {_END}
        ORDER BY zxid DESC LIMIT 1), 0),
    EXISTS (SELECT FROM {{schema}}.changes WHERE zxid = %(since)s),
    (SELECT generation FROM {{schema}}.sessions WHERE id = %(id)s),
    (SELECT array_agg(events ORDER BY zxid) FROM {{schema}}.changes
        WHERE zxid > %(since)s AND zxid < {_END} AND %(since)s >= 0),
    (extract(epoch FROM clock_timestamp()) * 1000)::bigint
"""
# With this statement, heartbeats commit without waiting for the disk.
_AT_ONCE = "SET LOCAL synchronous_commit = off"
_LOCK = "SELECT server FROM {schema}.tree FOR UPDATE"
_BEAT = """
UPDATE {schema}.sessions SET beats = beats + 1, heard = clock_timestamp()
WHERE id = %(id)s AND generation = %(generation)s
    AND %(age)s = (SELECT server FROM {schema}.tree)
"""
_COLUMNS = """data, acl, czxid, mzxid, pzxid, ctime, mtime, version, creates, aversion, owner,
    children"""
_NODES = f"""
SELECT parent, name, {_COLUMNS} FROM unnest(%s::text[], %s::text[]) AS wanted (parent, name)
JOIN {{schema}}.znodes USING (parent, name) WHERE true
"""
_NAMES = "SELECT parent, name FROM {schema}.znodes WHERE parent = ANY (%s)"
# A condition that omits the nodes of sessions that seem to have ended, by the server's clock.
_UNHEARD = f"""
    AND owner NOT IN (SELECT id FROM {{schema}}.sessions
        WHERE clock_timestamp() > heard + 2 * {_TIMEOUT} * interval '1 ms')
"""
_DELETE = """
DELETE FROM {schema}.znodes USING unnest(%s::text[], %s::text[]) AS gone (parent, name)
WHERE znodes.parent = gone.parent AND znodes.name = gone.name
"""
_SAVE = f"""
INSERT INTO {{schema}}.znodes (parent, name, {_COLUMNS})
SELECT * FROM unnest(%s::text[], %s::text[], %s::bytea[], %s::text[], %s::bigint[], %s::bigint[],
    %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
    %s::bigint[], %s::integer[])
ON CONFLICT (parent, name) DO UPDATE SET
    data = excluded.data, acl = excluded.acl, czxid = excluded.czxid, mzxid = excluded.mzxid,
    pzxid = excluded.pzxid, ctime = excluded.ctime, mtime = excluded.mtime,
    version = excluded.version, creates = excluded.creates, aversion = excluded.aversion,
    owner = excluded.owner, children = excluded.children
"""
_TRIM = """
DELETE FROM {schema}.changes WHERE zxid <= (
    SELECT zxid FROM {schema}.changes ORDER BY zxid DESC LIMIT 1 OFFSET %s)
"""
_CHANGE = "INSERT INTO {schema}.changes VALUES (%s, %s)"
_EPHEMERALS = f"""
SELECT parent, name, {_COLUMNS} FROM {{schema}}.znodes WHERE owner = %s AND owner <> 0
"""
_SESSIONS = f"""
SELECT id, password, {_TIMEOUT}, generation, 0, age, beats FROM {{schema}}.sessions
"""
# A session that represents all workers with claims in lost commits. New sessions wait for the end
# of this session. Its `beats` are the milliseconds for which the workers have certainly been
# silent.
_GUARD = f"""
INSERT INTO {{schema}}.sessions (id, password, timeout, generation, age)
SELECT -1, '', {_GRANTED % "coalesce(max(timeout), %s)"}, 1, %s FROM {{schema}}.sessions
WHERE id = -1 OR id IN (
    SELECT owner FROM {{schema}}.znodes WHERE owner <> 0 AND parent LIKE '%%/workers')
ON CONFLICT (id) DO UPDATE SET timeout = excluded.timeout, age = excluded.age, beats = 0
"""
_FORMER = f"SELECT id, {_TIMEOUT}, beats FROM {{schema}}.sessions WHERE age <> %s"
_COUNT = "UPDATE {schema}.sessions SET beats = %s WHERE id = -1"
_PUT_SESSION = """
INSERT INTO {schema}.sessions (id, password, timeout, generation, age) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET
    generation = excluded.generation, beats = sessions.beats + 1, heard = clock_timestamp()
"""


class PostgresqlStore:
    """A connection to the coordinator's schema in PostgreSQL.

    :param timeout_seconds: the session timeout. The client waits for the server for a third of it.
    :param for_people: whether reads omit the nodes of sessions that are silent by the server's
        clock. A command is too short to watch sessions, and after the last worker no process
        watches them.
    """

    waits_for_network = True
    look_seconds = LOOK_SECONDS
    rest_seconds = REST_SECONDS

    def __init__(
        self,
        address: SchemaAddress,
        timeout_seconds: float,
        app: str = "-",
        *,
        for_people: bool = False,
    ) -> None:
        self.name = address.server
        self._address = address
        self._omitted = _UNHEARD if for_people else ""
        self._parts: list[str] = []
        self._news: tuple[Any, ...] = ()
        self._nodes: dict[str, TreeNode | None] = {}
        self._names: dict[str, list[str]] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._counted: tuple[int, float] | None = None
        self.woken = self._writing = False
        self._saves = 0
        self._timeout_milliseconds = round(timeout_seconds * 1000)
        patience = timeout_seconds / 3
        try:
            self._connection = connect(
                address, seconds=patience, name=connection_name(app, "coordinator")
            )
        except psycopg.Error as error:
            raise translated(address, error) from error
        self._role = self._connection.info.user
        try:
            self._set_up(patience)
        except psycopg.Error as error:
            self.close()
            if isinstance(error, errors.InsufficientPrivilege):
                raise self._rights_error("read") from error
            raise translated(address, error, self._role) from error
        except BaseException:
            self.close()
            raise

    def _set_up(self, patience_seconds: float) -> None:
        connection = self._connection
        address = self._address
        self._filler = psycopg.ClientCursor(connection)
        if address.pooled:
            raise _pooler_error(address)
        check_format(connection, address)
        [(pid, standby, self.age, readable, writable)] = self._rows(_SERVER)
        _check_pooler(connection, address, pid)
        if not standby and _ages.setdefault(address, self.age) != self.age:
            _ages[address] = self.age
            connection.outdate_others()
        self.read_only = standby or not writable
        if not readable or not (writable or self._omitted):
            raise self._rights_error("write" if readable else "read")
        self._channel = f"qdo:{address.schema}"[:63]
        milliseconds = round(patience_seconds * 1000)
        idle = round(min(IDLE_SECONDS, patience_seconds / 2) * 1000)
        text = _SET_UP.format(idle=idle, answer=milliseconds, channel=self._channel)
        connection.execute(text.encode(), prepare=False)
        connection.add_notify_handler(self._notified)
        self.bell = connection.pgconn.socket

    def _rights_error(self, verb: str) -> PostgresqlRightsError:
        kind = "onlooker" if self._omitted else "worker"
        return PostgresqlRightsError(
            server=self.name,
            role=self._role,
            reason=f"it may not {verb} the coordinator's tables",
            remedy=f"`qdo admin broker grants {self._role} --for {kind}` and what it prints",
        )

    def close(self) -> None:
        self._connection.close()

    def _filled(self, statement: str, values: Any = None) -> str:
        return self._filler.mogrify(statement.format(schema=self._address.schema).encode(), values)

    def _run(self, *parts: str) -> list[list[Any]]:
        """Send statements as one message; return the rows of each statement."""
        cursor = self._connection.execute("; ".join(parts).encode(), prepare=False)
        found = []
        while True:
            found.append(cursor.fetchall() if cursor.description else [])
            if not cursor.nextset():
                return found

    def _rows(self, statement: str, values: Any = None) -> list[Any]:
        return self._run(self._filled(statement, values))[0]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Roll back a refused transaction; give up the connection after other errors."""
        try:
            yield
        except psycopg.Error as error:
            reason = translated(self._address, error, self._role)
            if isinstance(reason, UNDONE):
                self.rollback()
                raise reason from error
            self._connection.close()
            raise ConnectionDropped(str(reason)) from error

    # --- wakeups ----------------------------------------------------------------------

    def _notified(self, notification: psycopg.Notify) -> None:
        if notification.pid != self._connection.info.backend_pid:
            self.woken = True

    def drain(self) -> bool:
        with self._guarded():
            pgconn = self._connection.pgconn
            pgconn.consume_input()
            while notification := pgconn.notifies():
                if notification.be_pid != pgconn.backend_pid:
                    self.woken = True
        woken = self.woken
        self.woken = False
        return woken

    def announce(self) -> None:
        """Do nothing, because the commit has sent the notification and is durable."""

    # --- transactions -----------------------------------------------------------------

    def begin(
        self, session: SessionRow | None, *, write: bool, since: int, operations: Operations = ()
    ) -> StoredState:
        nodes, listed = paths_of(operations)
        id, generation = (0, 0) if session is None else (session.id, session.generation)
        values = {"id": id, "generation": generation, "age": self.age, "since": since}
        parts = [self._filled(_STATE, values)]
        if nodes:
            omitted = "" if write else self._omitted
            parts += [
                self._filled(_NODES + omitted, _keys(nodes)),
                self._filled(_NAMES + omitted, ([*map(folder_of, listed)],)),
            ]
        if write:
            parts = ["BEGIN", self._filled(_LOCK), self._filled(_BEAT, values), *parts]
        elif nodes:
            parts = ["BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY", *parts, "COMMIT"]
        with self._guarded():
            found = self._run(*parts)
            self._writing = write
        if nodes:
            self._nodes = dict.fromkeys(nodes)
            self._names = {path: [] for path in listed}
            self._take(found[-2 if write else -3])
            for parent, name in found[-1 if write else -2]:
                self._names[parent or "/"].append(name)
        [(zxid, complete, known, missed, now)] = found[3 if write else int(bool(nodes))]
        if write and session is None:
            zxid = self._adopted(zxid, *found[1][0])
        elif write and found[1] != [(self.age,)]:
            self.rollback()
            raise ConnectionDropped("the tables were replaced, and another age has begun")
        events = [(kind, path) for text in missed or () for kind, path in json.loads(text)]
        return StoredState(zxid, None if since >= 0 and not complete else events, 0, known, now)

    def _take(self, rows: Iterable[Any]) -> None:
        for parent, name, *values in rows:
            self._nodes[_path(parent, name)] = TreeNode(*values)

    def _adopted(self, zxid: int, server: str) -> int:
        """Begin the next epoch if another server or timeline wrote the table before."""
        if server == self.age:
            return zxid
        parts = [self._filled("UPDATE {schema}.tree SET server = %s", (self.age,))]
        if server:
            self._news = (self.name, self.age, server, zxid)
            timeline = int(self.age.split(":")[1], 16)  # two recoveries may end at the same zxid
            zxid = max(zxid // EPOCH + 1, timeline) * EPOCH
            parts.append(self._filled(_CHANGE, (zxid, "[]")))
            parts.append(self._filled(_GUARD, (self._timeout_milliseconds, server)))
        with self._guarded():
            self._run(*parts)  # write at once, because this transaction reads it
        return zxid

    def _write(self, statement: str, values: Any = None) -> None:
        """Collect a statement for `commit`."""
        self._parts.append(self._filled(statement, values))

    def commit(self) -> None:
        if self._writing:
            parts = self._parts or [_AT_ONCE]
            with self._guarded():
                self._run(*parts, "COMMIT")
            self._writing = False
            if self._news:
                log.warning(
                    "the coordinator at %s is on another server or timeline: %s, before %s; commits"
                    " after zxid %d may be missing; all sessions end after their timeouts, and"
                    " messages processed since the last stored progress run again",
                    *self._news,
                )
        self._forget()

    def rollback(self) -> None:
        self._writing = False
        self._forget()
        if self._connection.info.transaction_status in _OPEN:
            with contextlib.suppress(psycopg.Error):
                self._run("ROLLBACK")

    def _forget(self) -> None:
        # Free memory, because a connection may be idle for a long time.
        self._nodes = {}
        self._names = {}
        self._parts.clear()
        self._news = ()

    # --- znodes -----------------------------------------------------------------------

    def node(self, path: str) -> TreeNode | None:
        if path not in self._nodes and is_valid(path):
            self._nodes[path] = None
            with self._guarded():
                self._take(self._rows(_NODES, _keys([path])))
        return self._nodes.get(path)

    def names(self, path: str) -> Iterable[str]:
        return self._names[path]

    def ephemerals(self, session: int) -> list[str]:
        with self._guarded():
            rows = self._rows(_EPHEMERALS, (session,))
            self._take(rows)
            parents = {parent or "/" for parent, *_ in rows} - self._nodes.keys()
            self._take(self._rows(_NODES, _keys(parents)))
        return [_path(parent, name) for parent, name, *_ in rows]

    def save(
        self, changes: Mapping[str, TreeNode | None], zxid: int, events: Iterable[Event]
    ) -> None:
        gone = [path for path, node in changes.items() if node is None]
        rows = [(*key_of(path), *node.row()) for path, node in changes.items() if node is not None]
        if gone:
            self._write(_DELETE, _keys(gone))
        if rows:
            self._write(_SAVE, [list(column) for column in zip(*rows, strict=True)])
        self._write(_CHANGE, (zxid, json.dumps(list(dict.fromkeys(events)))))
        self._write("SELECT pg_notify(%s, '')", (self._channel,))
        self._saves += 1
        if self._saves % _TRIM_EVERY == 0:
            self._write(_TRIM, (KEPT_CHANGES,))

    # --- sessions ---------------------------------------------------------------------

    def sessions(self) -> list[tuple[SessionRow, float]]:
        with self._guarded():
            rows = self._rows(_SESSIONS)
        now = clock()
        last = self._beats
        self._beats = {
            id: last[id] if id in last and last[id][0] == beats else (beats, now)
            for id, *_, beats in rows
        }
        return [(SessionRow(*row[:-1]), self._beats[row[0]][1]) for row in rows]

    def outlast(self) -> tuple[float, list[int]]:
        """Count the silence of sessions of earlier ages in the table; see `Store.outlast`."""
        # A process reads the silence from the table, adds the time since then by its own clock, and
        # stores the sum. So the wait continues across processes and connections, and does not
        # depend on a server's clock.
        with self._guarded():
            rows = self._rows(_FORMER, (self.age,))
        guards = [row[1:] for row in rows if row[0] == -1]
        if not guards:
            return 0.0, []
        [(timeout, stored)] = guards
        if self._counted is None:
            self._counted = stored, clock()
        base, since = self._counted
        silent = max(stored, base + int((clock() - since) * 1000))
        if silent >= stored + _COUNT_MILLISECONDS:
            self._write(_AT_ONCE)
            self._write(_COUNT, (silent,))
        over = [id for id, milliseconds, _ in rows if milliseconds <= silent]
        return max(0, timeout - silent) / 1000, over

    def put_session(self, row: SessionRow) -> SessionRow:
        values = row.id, row.password, row.timeout_milliseconds, row.generation, row.age
        self._write(_PUT_SESSION, values)
        return row

    def delete_session(self, session: int) -> None:
        self._write("DELETE FROM {schema}.sessions WHERE id = %s", (session,))

    def beat(self, row: SessionRow) -> None:
        values = {"id": row.id, "generation": row.generation, "age": self.age}
        with self._guarded():
            self._run("BEGIN", _AT_ONCE, self._filled(_BEAT, values), "COMMIT")


def _keys(paths: Collection[str]) -> tuple[list[str], list[str]]:
    keys = [key_of(path) for path in paths]
    return [parent for parent, _ in keys], [name for _, name in keys]


def _path(parent: str, name: str) -> str:
    return f"{parent}/{name}" if name else parent


def _check_pooler(connection: PostgresqlConnection, address: SchemaAddress, pid: int) -> None:
    """Raise PostgresqlUnsuitableError if a pooler changes the connection for each transaction."""
    if pid == connection.info.backend_pid:
        return
    # Poolers report their own process id. In session mode, a second client does not change the
    # connection.
    with contextlib.closing(connect(address)) as other, other.transaction():
        other.execute("SELECT 1")
        (found,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    if found != pid:
        raise _pooler_error(address)


def _pooler_error(address: SchemaAddress) -> PostgresqlUnsuitableError:
    return PostgresqlUnsuitableError(
        server=address.server,
        reason="a coordinator needs connections of its own, and a pooler in transaction mode is"
        " between; name the server, or a pool in session mode, in the setting `coordinator`",
    )
