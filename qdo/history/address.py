"""Checks and opens the address of a history, which is a SQLite file or a PostgreSQL database.

A history uses the same connections as a broker of the same kind. Therefore addresses, files and
errors are the same. Opening a history imports SQLAlchemy and sqlite3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from qdo.brokers.registry import connector_of, kind_of
from qdo.errors import SettingsError
from qdo.system.files import sqlite_path
from qdo.text import how_to_install, wrong_form

if TYPE_CHECKING:
    from sqlalchemy import Engine

# Maximum time for which a write waits for another write to the same file. The writer tries again a
# second later.
BUSY_SECONDS = 2.0
# Time limit of a statement in PostgreSQL, including waits for locks.
STATEMENT_SECONDS = 10.0


def history_error(url: str) -> str | None:
    """Return the reason why an address is invalid; None for a valid or empty address.

    Opens nothing.
    """
    if not url:
        return None
    if url.startswith("sqlite:"):
        from qdo.system.sqlite import sqlite_address_error

        return sqlite_address_error(url)
    if not url.startswith("postgresql://"):
        return wrong_form(url, "sqlite:PATH", "postgresql://USER@HOST:PORT/DATABASE")
    reason = kind_of(url).address_error(url)
    if reason is None and any(name == "schema" for name, _ in parse_qsl(urlsplit(url).query)):
        return "a history has no option 'schema'; set the search_path of its role in PostgreSQL"
    return reason


def open_engine(url: str, *, writes: bool) -> Engine:
    """Return a SQLAlchemy engine for a history, without connecting.

    :param writes: begin each transaction of SQLite with the write lock.
    :raises SettingsError: a library is missing, or the address is invalid.
    """
    reason = history_error(url) if url else "it must name a database: sqlite:PATH, for instance"
    if reason is not None:
        raise SettingsError(name="history", reason=reason)
    try:
        import sqlalchemy
        from sqlalchemy import event
        from sqlalchemy.pool import NullPool
    except ImportError as error:
        raise SettingsError(
            name="history", reason=f"it needs SQLAlchemy ({error}); {how_to_install('sql')}"
        ) from error
    path = sqlite_path(url)
    if path is None:
        try:
            connect = connector_of(url)
        except SettingsError as error:
            raise SettingsError(name="history", reason=error.details["reason"]) from error

        def open_server() -> Any:
            connection = connect()
            connection.execute(f"SET statement_timeout = {round(STATEMENT_SECONDS * 1000)}")
            connection.commit()
            return connection

        return sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=open_server, poolclass=NullPool
        )
    from qdo.system.sqlite import Format, open_database

    # The schema is empty, because SQLAlchemy creates the tables, which are the same in both
    # databases.
    file = Format("history", application_id=0x71646F68, version=1, schema="")  # "qdoh"

    def open_file() -> Any:
        connection = open_database(path, file, durable=False)
        connection.execute(f"PRAGMA busy_timeout = {round(BUSY_SECONDS * 1000)}")
        return connection

    engine = sqlalchemy.create_engine("sqlite://", creator=open_file, poolclass=NullPool)
    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine
