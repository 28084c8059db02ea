"""Opening SQLite files that belong to qdo: safe settings, a format check, clear errors."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from qdo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseForeignError,
    DatabaseFullError,
    DatabaseNewerError,
)

BUSY_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Format:
    """Identity of a kind of file: `application_id` in its header, a version, its schema."""

    name: str
    application_id: int
    version: int
    schema: str


def open_database(path: str, kind: Format, *, durable: bool = True) -> sqlite3.Connection:
    """Open `path`, making it if it is missing, in autocommit mode with write-ahead log.

    :param durable: sync at every commit; otherwise only at checkpoints of the log, where a
        power cut may take back the newest commits, never tear one.
    :raises DatabaseCorruptError: damaged, or no SQLite file.
    :raises DatabaseForeignError: another program's file, or qdo's for another purpose.
    :raises DatabaseNewerError: written by a newer qdo.
    :raises DatabaseFullError: no room.
    :raises DatabaseError: anything else, such as a missing permission.
    """
    with translated(path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        connection = sqlite3.connect(
            path,
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            _identify(connection, path, kind)
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("PRAGMA temp_store = MEMORY")
        except BaseException:
            connection.close()
            raise
        return connection


def _identify(connection: sqlite3.Connection, path: str, kind: Format) -> None:
    if _check(connection, path, kind):
        return
    # Look again under the write lock: another process may be making the file just now.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _check(connection, path, kind):
            for statement in kind.schema.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {kind.application_id}")
            connection.execute(f"PRAGMA user_version = {kind.version}")
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _check(connection: sqlite3.Connection, path: str, kind: Format) -> bool:
    """Return whether the file is of this kind; False when it is empty."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if owner == 0 and version == 0 and tables == 0:
        return False
    if owner != kind.application_id:
        raise DatabaseForeignError(path=path, reason=f"it is no {kind.name} file of qdo")
    if version > kind.version:
        raise DatabaseNewerError(path=path, found=version, known=kind.version)
    if version < kind.version:
        raise DatabaseForeignError(path=path, reason=f"its format {version} was never released")
    return True


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn sqlite3's and the file system's errors into qdo's."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(path, error) from error
    except OSError as error:
        raise DatabaseError(path=path, reason=error.strerror or str(error)) from error


def _translate(path: str, error: sqlite3.Error) -> DatabaseError:
    code = _result_code(error)
    if code == _FULL:
        return DatabaseFullError(path=path, reason=str(error))
    if code in (_CORRUPT, _NOT_A_DATABASE):
        return DatabaseCorruptError(path=path, reason=str(error))
    if code == _CANNOT_OPEN:
        return DatabaseError(path=path, reason=f"{error}; check that the folder can be written")
    return DatabaseError(path=path, reason=str(error))


def _result_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code, 0 when it is unknown.

    Python 3.10 gives only SQLite's words for it, which are the same in every version.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if code is not None else _CODES_BY_WORDS.get(str(error), 0)


_CORRUPT = 11
_FULL = 13
_CANNOT_OPEN = 14
_NOT_A_DATABASE = 26
_CODES_BY_WORDS = {
    "database disk image is malformed": _CORRUPT,
    "database or disk is full": _FULL,
    "unable to open database file": _CANNOT_OPEN,
    "file is not a database": _NOT_A_DATABASE,
}
