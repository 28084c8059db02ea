"""Execute statements in an app's transaction, through psycopg, SQLAlchemy or Django."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from qdo.brokers.django_connections import django_connection, driver_connection
from qdo.errors import UsageError
from qdo.system.async_connections import AwaitedConnection

# SQLAlchemy passes an asynchronous connection to the function of `AsyncSession.run_sync`.
_DRIVERS = (psycopg.Connection, psycopg.AsyncConnection)


def executor_of(connection: Any) -> tuple[Callable[[str, Any], Any], Any]:
    """Return a function that executes statements in the transaction, and psycopg's connection.

    :raises UsageError: the connection is not from psycopg, or from SQLAlchemy or Django with
        psycopg, or the transaction is in a two-phase commit. PostgreSQL cannot prepare a
        transaction that sends
        notifications.
    """
    if isinstance(connection, AwaitedConnection):
        _check_one_phase(connection.driver)
        return connection.execute, connection.driver
    wrapper = django_connection(connection)
    if wrapper is not None:
        connection = driver_connection(wrapper)
    if isinstance(connection, psycopg.Connection):
        _check_one_phase(connection)
        return connection.cursor(row_factory=tuple_row).execute, connection
    sqlalchemy: Any = sys.modules.get("sqlalchemy")
    orm: Any = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(connection, orm.Session | orm.scoped_session):
        connection = connection.connection()
    found = f"{type(connection).__module__.partition('.')[0]}'s {type(connection).__name__}"
    if sqlalchemy is not None and isinstance(connection, sqlalchemy.Connection):
        driver = connection.connection.driver_connection
        if isinstance(driver, _DRIVERS):
            _check_one_phase(driver)
            return connection.exec_driver_sql, driver
        found += f" with the driver {connection.dialect.driver}"
    raise UsageError(
        reason="connection must be a Connection of psycopg 3, or a Session or Connection of "
        "SQLAlchemy with postgresql+psycopg://, or a connection or alias of Django with psycopg 3,"
        f" got {found}; coroutines pass an async one of these to asend or arequest, and asyncpg "
        "cannot be used: connect with psycopg, or send with a qdo.outbox.Outbox"
    )


def _check_one_phase(driver: Any) -> None:
    if getattr(driver, "_tpc", None) is not None:  # psycopg has no public attribute for it
        raise UsageError(
            reason="connection must not be in a two-phase commit, because PostgreSQL prepares no "
            "transaction that has notified others; send with a qdo.outbox.Outbox in it"
        )
