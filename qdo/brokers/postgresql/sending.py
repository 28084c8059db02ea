"""Messages with options, and messages in the transaction of an app."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import errors

from qdo.brokers.base import Outgoing
from qdo.brokers.postgresql.session import PostgresqlConnection, translated
from qdo.brokers.postgresql.url import SchemaAddress
from qdo.brokers.postgresql.writer import columns
from qdo.encoding import with_header
from qdo.errors import UsageError
from qdo.positions import new_id, position_now, position_of_time

_SECOND = 10_000_000
_ARRAYS = (
    "%b::text[], %b::text[], %b::text[], %b::bytea[],"
    " %b::text[], %b::bigint[], %b::text[], %b::bigint[]"
)
"""Names, keys, headers, bodies, ids, dues, deduplication keys and windows."""


OTHER_SCHEMA = "QD002"
"""SQLSTATE of the error that `stage` raises."""
_DRIVERS = (psycopg.Connection, psycopg.AsyncConnection)
"""SQLAlchemy gives an asynchronous connection to the function of `AsyncSession.run_sync`."""
_NO_SCHEMA = (errors.UndefinedFunction, errors.InvalidSchemaName)


class SendWork:
    """Sends messages with options, in the given order; its result is their ids.

    :param max_queues: see `Broker.max_queues`.
    """

    def __init__(
        self, schema: str, app: str, messages: Sequence[Outgoing], max_queues: int | None
    ) -> None:
        self._statement = f"SELECT {schema}.send(%s, {_ARRAYS}, %s, %s)"  # nosec B608 # the address allows a-z, 0-9 and _
        arrays = arrays_of(messages)
        self._parameters = (app, *arrays, max_queues, None)

    def __call__(self, connection: PostgresqlConnection) -> list[str]:
        (ids,) = connection.execute(self._statement, self._parameters).fetchone() or ([],)
        return list(ids)


class StageWork:
    """Sends messages when a transaction of the app commits; its result is their ids."""

    def __init__(
        self,
        address: SchemaAddress,
        app: str,
        messages: Sequence[Outgoing],
        max_queues: int | None,
        node: int,
    ) -> None:
        self._address = address
        self._statement = f"SELECT {address.schema}.stage(%s, %s, {_ARRAYS}, %s)"  # nosec B608 # the address allows a-z, 0-9 and _
        arrays = arrays_of(messages, with_ids=True)
        self._ids: list[str] = arrays[4]
        self._parameters = (node, app, *arrays, max_queues)

    def run(self, connection: Any) -> list[str]:
        """Keep the messages in the transaction of a connection; return their ids.

        :raises UsageError: it is not a connection of psycopg, or to another database.
        """
        execute, driver = _executor(connection)
        try:
            execute(self._statement, self._parameters)
        except Exception as error:
            found = getattr(error, "orig", error)  # SQLAlchemy wraps the errors of psycopg
            if not isinstance(found, psycopg.Error):
                raise
            if found.sqlstate == OTHER_SCHEMA or isinstance(found, _NO_SCHEMA):
                raise UsageError(
                    reason="the connection must be to the database of the app's broker, "
                    f"{self._address.server}, got another; use a qdo.outbox.Outbox there"
                ) from error
            for kind, state in _STATES:
                if isinstance(found, kind):
                    raise UsageError(reason=f"the connection's transaction {state}") from error
            raise translated(self._address, found, driver.info.user) from error
        return self._ids


_STATES = (
    (errors.ReadOnlySqlTransaction, "is read-only; send in one that may write, on the primary"),
    (errors.InFailedSqlTransaction, "has failed; roll it back, and send in the next one"),
)


def _executor(connection: Any) -> tuple[Callable[[str, Any], Any], Any]:
    """Return the function that executes statements in a connection's transaction, and psycopg's
    connection."""
    if isinstance(connection, psycopg.Connection):
        return connection.execute, connection
    sqlalchemy: Any = sys.modules.get("sqlalchemy")
    orm: Any = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(connection, orm.Session | orm.scoped_session):
        connection = connection.connection()
    if (
        sqlalchemy is not None
        and isinstance(connection, sqlalchemy.Connection)
        and isinstance(connection.connection.driver_connection, _DRIVERS)
    ):
        return connection.exec_driver_sql, connection.connection.driver_connection
    raise UsageError(
        reason="connection must be a Connection of psycopg 3, or a Session or Connection of "
        f"SQLAlchemy with postgresql+psycopg://, got {type(connection).__name__}; for an "
        "AsyncSession use the session from run_sync"
    )


def arrays_of(messages: Sequence[Outgoing], *, with_ids: bool = False) -> tuple[Any, ...]:
    """Return the arrays that `send` and `stage` take.

    A delayed message has no position yet, so it gets a random id, which a header keeps.

    :param with_ids: give every message such an id.
    """
    now = position_now()
    ids: list[str | None] = []
    dues: list[int | None] = []
    headers: list[str | None] = []
    for message in messages:
        due = None if message.terms is None or message.terms.due is None else message.terms.due
        later = None if due is None or position_of_time(due) <= now else position_of_time(due)
        own = new_id() if later is not None or with_ids else None
        ids.append(own)
        dues.append(later)
        headers.append(message.headers if own is None else with_header(message.headers, qdo_id=own))
    names, keys, _, bodies = columns(messages)
    terms = [message.terms for message in messages]
    dedup_keys = [None if each is None else each.dedup_key for each in terms]
    windows = [None if each is None else round(each.dedup_seconds * _SECOND) for each in terms]
    return (
        names, keys, _sparse(headers), bodies, _sparse(ids), _sparse(dues), _sparse(dedup_keys),
        _sparse(windows),
    )  # fmt: skip


def _sparse(values: list[Any]) -> list[Any] | None:
    """Return None for an array of None."""
    return values if any(value is not None for value in values) else None


def check_text(message: Outgoing) -> None:
    """Check that PostgreSQL can store the texts of a message.

    :raises UsageError: one has NUL or surrogate characters.
    """
    options = message.terms
    texts = (
        ("key", message.key),
        ("headers", message.headers),
        ("dedup_key", None if options is None else options.dedup_key),
    )
    for word, text in texts:
        if text is not None and not _is_storable(text):
            raise UsageError(
                reason=f"the {word} of a message for queue {message.queue!r} must not contain NUL "
                f"or surrogate characters, which PostgreSQL cannot store, got {text!r}"
            )


def _is_storable(text: str) -> bool:
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:  # a stray surrogate
        return False
    return "\0" not in text
