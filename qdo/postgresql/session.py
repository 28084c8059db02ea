"""A connection to PostgreSQL, and a session that opens a lost connection again.

Every wait has a deadline, because a frozen server keeps its connections forever. psycopg waits with
Python's `select`, which gevent replaces. A native thread must use the original `select`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import psycopg
from psycopg import errors, pq
from psycopg.abc import PQGen

from qdo.broker_errors import (
    PostgresqlBusyError,
    PostgresqlConnectionsError,
    PostgresqlError,
    PostgresqlFullError,
    PostgresqlLoginError,
    PostgresqlReadOnlyError,
    PostgresqlRefusedError,
    PostgresqlRightsError,
    PostgresqlUnansweredError,
    PostgresqlUnreachableError,
    PostgresqlUnsuitableError,
    SchemaDiffersError,
    SchemaMissingError,
)
from qdo.errors import FailureKind, QdoError
from qdo.postgresql.url import SchemaAddress
from qdo.refusals import sqlstate_kind
from qdo.system.home_loop import check_descriptors
from qdo.system.native import original
from qdo.text import printable

T = TypeVar("T")
RV = TypeVar("RV")

CONNECT_SECONDS = 10.0
# The maximum duration of a statement. The longest statements write 64 MiB to a slow disk.
ANSWER_SECONDS = 30.0

_COMPILE = "SET jit = off"  # compiling a plan takes longer than running it
# The settings that every statement requires, instead of the defaults of the role and the database.
# Without the search path, statements could call functions of other roles in other schemas.
_DEFAULTS = f"""
SET search_path = pg_catalog, pg_temp;
SET standard_conforming_strings = on;
SET array_nulls = on;
SET client_min_messages = warning;
{_COMPILE}
"""

_LOOK_SECONDS = 0.5
# The time after which a waiting statement checks whether another host is the primary.
_ASK_SECONDS = 8.0
# The host that did not respond to the last connection, by `SchemaAddress.server`.
_silent: dict[str, str] = {}
# The time at which this process found another host or server, by `SchemaAddress.server`.
_renewed: dict[str, float] = {}

# Passwords by conninfo. Addresses have none, because commands, logs and znodes show addresses.
_passwords: dict[str, str] = {}

# The bits of events: psycopg's generators return the awaited events, and get the events that
# occurred.
_READ = 1
_WRITE = 2
_RIGHT = re.compile(r"permission denied for (schema|table|function|database) (\S+)")
# The rights that a worker's role needs on some tables. On all other tables, the role needs SELECT.
_TABLE_RIGHTS = {"dead_letters": "SELECT, UPDATE, DELETE"}
_KINDS: tuple[tuple[tuple[type[psycopg.Error], ...], type[QdoError]], ...] = (
    ((errors.InvalidPassword, errors.InvalidAuthorizationSpecification), PostgresqlLoginError),
    ((errors.ReadOnlySqlTransaction,), PostgresqlReadOnlyError),
    ((errors.DiskFull,), PostgresqlFullError),
    (
        (
            errors.LockNotAvailable,
            errors.DeadlockDetected,
            errors.SerializationFailure,
            errors.QueryCanceled,
        ),
        PostgresqlBusyError,
    ),
)
# The errors at login, for which libpq has no SQLSTATE.
_LOGIN = re.compile(
    "password|authentication|pg_hba.conf|role .* (does not exist|is not permitted to log in)"
)
# The SQLSTATEs of lost connections and server shutdowns.
_REACH = re.compile("08|57P0")
# The errors of the server, PgBouncer and the system if a resource for a connection is missing, each
# with its remedy.
_REMEDIES = (
    (
        re.compile(
            "too many (clients|connections)|connection slots are reserved|no more connections"
            "|query_wait_timeout"
        ),
        "raise max_connections or the limit of the role, the database or the pooler, or run fewer"
        " processes",
    ),
    (
        re.compile("|".join(os.strerror(number) for number in (errno.EMFILE, errno.ENFILE))),
        "raise the limit of descriptors of this process, such as LimitNOFILE or `ulimit -n`",
    ),
)
# Errors about a part of the schema.
_NO_PART = (errors.UndefinedTable, errors.UndefinedFunction, errors.UndefinedColumn)
_NO_DATABASE = re.compile("database .* does not exist|no such database")
_READ_ONLY = re.compile("session is read-only|server is in hot standby")
# The errors that libpq raises before it connects, about parameters of the address.
_PARAMETER = re.compile("^invalid .* value|^invalid (integer|port)")


def native_poll() -> Any:
    """Return a poll object that blocks the native thread while it waits, even under gevent."""
    return original("select", "poll", select.poll)()


def loop_poll() -> Any:
    """Return a poll object that lets other greenlets run under gevent."""
    return select.poll()


def wait_for(poll: Any, fileno: int, wanted: int, deadline: float) -> int:
    """Wait until a socket is readable or writable; return the event, or 0 at the deadline."""
    events = (select.POLLIN if wanted & _READ else 0) | (select.POLLOUT if wanted & _WRITE else 0)
    poll.register(fileno, events)
    found = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    if not found:
        return 0
    ready = found[0][1]
    failed = ready & ~(select.POLLIN | select.POLLOUT)
    can = (_READ if ready & select.POLLIN else 0) | (_WRITE if ready & select.POLLOUT else 0)
    return can | (wanted if failed else 0)


def use_password(address: SchemaAddress, password: str) -> None:
    """Log in with this password at an address, in place of libpq's sources of passwords."""
    _passwords.update(dict.fromkeys(address.conninfos, password))


class PostgresqlConnection(psycopg.Connection[Any]):
    """A connection with a deadline for every wait.

    :ivar make_poll: the function `native_poll` or `loop_poll`.
    :ivar answer_seconds: the maximum duration of a statement.
    :ivar address: the address that `connect` got; `host` is one of the address's hosts.
    """

    address: SchemaAddress

    make_poll: Callable[[], Any] = staticmethod(native_poll)
    answer_seconds: float | None = None
    host = ""
    made_at = 0.0
    _is_unconfirmed = False

    def is_outdated(self) -> bool:
        """Return whether this process found another server after it opened the connection."""
        return self.made_at < _renewed.get(self.address.server, 0.0)

    def outdate_others(self) -> None:
        """Give up the process's earlier connections, because their server may stay silent."""
        _renewed[self.address.server] = self.made_at

    def _ask_others(self) -> None:
        """Open another connection; if it leads to another host, this connection is outdated."""
        _silent[self.address.server] = self.host
        with contextlib.suppress(psycopg.Error):
            connect(self.address, self.make_poll, _LOOK_SECONDS * 4).close()

    def noticed(self, notice: errors.Diagnostic) -> None:
        """Record that a commit is unconfirmed, because no synchronous standby has it."""
        # The server reports such a commit as successful if a timeout or an operator ends its wait
        # for the standby.
        self._is_unconfirmed |= notice.source_function == "SyncRepWaitForLSN"

    def wait(self, gen: PQGen[RV], interval: float = 0.0, timeout: float | None = None) -> RV:
        if timeout is None:
            timeout = ANSWER_SECONDS if self.answer_seconds is None else self.answer_seconds
        deadline = time.monotonic() + timeout
        ask = time.monotonic() + _ASK_SECONDS
        try:
            wanted: Any = next(gen)
            while True:
                look = min(deadline, time.monotonic() + _LOOK_SECONDS)
                if ready := wait_for(self.make_poll(), self.pgconn.socket, wanted, look):
                    wanted = gen.send(ready)
                elif self.is_outdated():
                    self.pgconn.finish()
                    raise psycopg.OperationalError("another server has taken over")
                elif look == deadline:
                    _silent[self.address.server] = self.host
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer for {timeout:g} s")
                elif look > ask and len(self.address.conninfos) > 1:
                    self._ask_others()
                    ask = time.monotonic() + _ASK_SECONDS
        except StopIteration as end:
            if self._is_unconfirmed:
                self.pgconn.finish()
                raise psycopg.OperationalError("no synchronous standby confirmed") from None
            result: RV = end.value
            return result
        except BaseException:
            # If the interpreter closed the generator later, it would print errors.
            with contextlib.suppress(psycopg.Error):
                gen.close()
            raise


def connect(
    address: SchemaAddress,
    make_poll: Callable[[], Any] = native_poll,
    seconds: float | None = None,
    name: str = "qdo",
) -> PostgresqlConnection:
    """Return a connection to the first server that accepts it, or raise the last error.

    :param seconds: the maximum duration of connecting and of each statement; None: the default.
    :param name: the `application_name`, which `pg_stat_activity` shows.
    """
    deadline = time.monotonic() + (CONNECT_SECONDS if seconds is None else seconds)
    for left in range(len(address.conninfos), 0, -1):
        share = max(0.0, deadline - time.monotonic()) / left  # a host that is down does not respond
        try:
            connection = _connect(address.conninfos[-left], make_poll, share, name)
            break
        except psycopg.OperationalError:
            if left == 1:
                raise
    connection.make_poll = make_poll
    connection.answer_seconds = seconds
    connection.address = address
    connection.made_at = time.monotonic()
    connection.host = f"{connection.info.host} {connection.info.hostaddr}:{connection.info.port}"
    if _silent.pop(address.server, connection.host) != connection.host:
        connection.outdate_others()
    connection.prepare_threshold = None if address.pooled else 1
    connection.autocommit = True
    connection.add_notice_handler(connection.noticed)
    connection.execute((_COMPILE if address.pooled else _DEFAULTS).encode(), prepare=False)
    return connection


def _connect(
    conninfo: str, make_poll: Callable[[], Any], patience: float, name: str
) -> PostgresqlConnection:
    deadline = time.monotonic() + patience
    if conninfo in _passwords:
        conninfo += f"&password={quote(_passwords[conninfo], safe='')}"
    conninfo += f"&application_name={quote(name, safe='')}"
    pgconn = pq.PGconn.connect_start(conninfo.encode())
    state: int = pq.PollingStatus.WRITING
    while state != pq.PollingStatus.OK:
        if pgconn.status == pq.ConnStatus.BAD or state == pq.PollingStatus.FAILED:
            message = pgconn.get_error_message()
            try:
                check_descriptors(1)
            except OSError as error:  # libpq does not report this error
                message = str(error.strerror)
            # Callers may keep the error, but it must not keep the socket open.
            raise psycopg.OperationalError(message, pgconn=errors.finish_pgconn(pgconn))
        wanted = _READ if state == pq.PollingStatus.READING else _WRITE
        if not wait_for(make_poll(), pgconn.socket, wanted, deadline):
            pgconn.finish()
            raise psycopg.OperationalError(f"no answer for {patience:g} s")
        state = pgconn.connect_poll()
    pgconn.nonblocking = 1
    return PostgresqlConnection(pgconn)


def with_lock_timeout(
    connection: PostgresqlConnection, act: Callable[[PostgresqlConnection], T], seconds: float
) -> T:
    """Call `act` in a transaction that waits at most `seconds` for each lock."""
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = {round(seconds * 1000)}")
        return act(connection)


def _set_up(connection: PostgresqlConnection) -> None:
    """Set the settings that qdo requires, instead of the role's and database's defaults."""
    milliseconds = round(ANSWER_SECONDS * 1000) + 1000  # so qdo gives up before the server
    connection.execute(
        "SET default_transaction_isolation = 'read committed';"
        "SET lock_timeout = 0;"
        "SET idle_session_timeout = 0;"
        f"SET idle_in_transaction_session_timeout = {milliseconds};"
        f"SET tcp_user_timeout = {milliseconds};"  # unread responses keep locks
        f"SET statement_timeout = {milliseconds};"
        "SELECT set_config('synchronous_commit', 'on', false)"
        " WHERE current_setting('synchronous_commit') = 'off'",
        prepare=False,
    )


def _has_ended(connection: PostgresqlConnection, poll: Any) -> bool:
    """Return whether the server has closed an idle connection, for example at a restart."""
    # An idle connection receives only notifications or its end; a statement shows the difference.
    if connection.closed or connection.is_outdated():
        return True
    try:
        if wait_for(poll, connection.pgconn.socket, _READ, 0.0):
            connection.execute("SELECT 1")
    except psycopg.Error:
        return True
    return False


class PostgresqlSession:
    """Opens a connection at the first use, and again after a loss. For one thread.

    :param prepare: a function of each new connection.
    :param name: the `application_name` of each.
    :ivar connection: the open connection, or None.
    """

    # Through a pooler, other clients would inherit the settings of a session. So the schema's
    # functions have their own settings, and writes are transactions with a lock timeout.

    def __init__(
        self,
        address: SchemaAddress,
        prepare: Callable[[PostgresqlConnection], None] = lambda connection: None,
        make_poll: Callable[[], Any] = native_poll,
        name: str = "qdo",
    ) -> None:
        self._address = address
        self._make_poll = make_poll
        self._prepare = prepare
        self._name = name
        self.connection: PostgresqlConnection | None = None
        self._role = ""

    def run(self, act: Callable[[PostgresqlConnection], T], *, writes: bool = False) -> T:
        """Call `act` with the connection, and return the result.

        :param writes: whether `act` may have stored messages when the connection is lost.
        :raises PostgresqlError: the server is unreachable or refuses the call; see its subclasses.
        :raises UsageError: the login, a right or the schema is missing.
        """
        try:
            connection = self._open()
        except psycopg.Error as error:
            raise translated(self._address, error, self._role) from error
        try:
            return act(connection)
        except psycopg.Error as error:
            lost = connection.closed or connection.broken
            read_only = isinstance(error, errors.ReadOnlySqlTransaction)
            if lost or read_only:
                self.close()  # another server may be primary now
            elif isinstance(error, _NO_PART):
                self._check_again()
            if lost and writes:
                reason = _reason(error)
                raise PostgresqlUnansweredError(
                    server=self._address.server, reason=reason
                ) from error
            raise translated(self._address, error, self._role) from error

    def _open(self) -> PostgresqlConnection:
        if self.connection is not None and _has_ended(self.connection, self._make_poll()):
            self.close()
        if self.connection is None:
            connection = connect(self._address, self._make_poll, name=self._name)
            self._role = connection.info.user
            try:
                if not self._address.pooled:
                    _set_up(connection)
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self.connection = connection
        return self.connection

    def _check_again(self) -> None:
        """Raise the error of `prepare` if the schema was dropped or upgraded after it."""
        self.close()
        with contextlib.suppress(psycopg.Error):
            self._open()

    def close(self) -> None:
        """Close the connection; the next call of `run` opens it again."""
        connection = self.connection
        self.connection = None
        if connection is not None:
            connection.close()


def translated(address: SchemaAddress, error: psycopg.Error, role: str = "") -> QdoError:
    """Return the qdo error for an error of psycopg; `role` is the login role, "" if unknown."""
    reason = _reason(error)
    server = address.server
    for lack, remedy in _REMEDIES:
        if lack.search(reason):
            return PostgresqlConnectionsError(server=server, reason=reason, remedy=remedy)
    for kinds, kind in _KINDS:
        if isinstance(error, kinds):
            return kind(server=server, reason=reason)
    if isinstance(error, errors.InvalidSchemaName):
        return SchemaMissingError(server=server, schema=address.schema)
    if isinstance(error, _NO_PART):
        remedy = "replace all functions with `qdo admin broker init`"
        return SchemaDiffersError(
            server=server, schema=address.schema, reason=reason, remedy=remedy
        )
    if isinstance(error, errors.InsufficientPrivilege):
        return _rights_error(address, reason, role)
    if isinstance(error, errors.DuplicatePreparedStatement | errors.InvalidSqlStatementName):
        reason = f"a pooler in transaction mode is between ({reason}); add pooler=transaction to"
        return PostgresqlUnsuitableError(server=server, reason=f"{reason} the broker's address")
    if error.sqlstate is None:
        return _login_error(address, error, reason)
    if _REACH.match(error.sqlstate):
        return PostgresqlUnreachableError(server=server, reason=reason)
    hint = printable(error.diag.message_hint or "")
    reason = f"{reason} ({hint})" if hint else reason
    if sqlstate_kind(error.sqlstate) is FailureKind.REFUSED:
        return PostgresqlRefusedError(server=server, state=error.sqlstate, reason=reason)
    return PostgresqlError(server=server, reason=reason)


def _login_error(address: SchemaAddress, error: psycopg.Error, reason: str) -> QdoError:
    server = address.server
    pgconn = error.pgconn
    if _RIGHT.search(reason) and pgconn is not None:
        return _rights_error(address, reason, (pgconn.user or b"").decode(), "CONNECT")
    if _LOGIN.search(reason):
        return PostgresqlLoginError(server=server, reason=reason)
    if _NO_DATABASE.search(reason):
        name = ((pgconn and pgconn.db) or b"").decode()
        remedy = f"create it with `createdb {name}`, or correct the address"
        reason = f"it has no such database; {remedy}"
        return PostgresqlUnsuitableError(server=server, reason=reason, name=name)
    if _PARAMETER.search(reason):
        return PostgresqlUnsuitableError(server=server, reason=reason)
    if _READ_ONLY.search(reason):
        return PostgresqlReadOnlyError(server=server, reason=reason)
    return PostgresqlUnreachableError(server=server, reason=reason)


def _rights_error(
    address: SchemaAddress, reason: str, role: str, on_database: str = "CREATE"
) -> PostgresqlRightsError:
    found = _RIGHT.search(reason)
    kind, name = found.groups() if found else ("schema", address.schema)
    if kind == "schema":
        right = f"USAGE ON SCHEMA {address.schema}"
    elif kind == "function":
        right = f"EXECUTE ON FUNCTION {address.schema}.{name}"
    elif kind == "database":
        right = f"{on_database} ON DATABASE {name}"
    else:
        right = f"{_TABLE_RIGHTS.get(name, 'SELECT')} ON {address.schema}.{name}"
    remedy = f"`GRANT {right} TO {_quoted(role) if role else 'ROLE'}`"
    return PostgresqlRightsError(
        server=address.server, role=role or "this role", reason=reason, remedy=remedy
    )


def _quoted(role: str) -> str:
    return role if re.fullmatch("[a-z_][a-z0-9_]*", role) else '"' + role.replace('"', '""') + '"'


def _reason(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error) or type(error).__name__
    return printable(" ".join(text.split()))
