"""Opens qdo's SQLite files with safe settings, a format check and clear errors."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from qdo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseFullError,
    DatabaseNewerError,
    DatabaseReplacedError,
    NotAQdoDatabaseError,
)
from qdo.system import files
from qdo.system.files import sqlite_path
from qdo.text import hide_credentials

BUSY_TIMEOUT_SECONDS = 30.0
_RETRY_SECONDS = (0.001, 0.01)

_NOT_TEXT = "Could not decode to UTF-8"


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file, with the `application_id` of its header, its version and its schema."""

    name: str
    application_id: int
    version: int
    schema: str
    # The statements that upgrade a file of each version to the next version.
    upgrades: Mapping[int, str] = field(default_factory=dict)


def open_database(path: str, kind: Format, *, durable: bool = True) -> sqlite3.Connection:
    """Open or create a database at `path`, in autocommit mode and with a write-ahead log.

    :param durable: sync at every commit. If False, sync only at checkpoints of the log. A power cut
        may then undo the newest commits, but each commit stays atomic.
    :raises DatabaseCorruptError: the file is damaged or not a SQLite file.
    :raises NotAQdoDatabaseError: the file belongs to another program, or has another purpose in
        qdo.
    :raises DatabaseNewerError: a newer qdo wrote the file.
    :raises DatabaseFullError: the disk is full.
    :raises DatabaseError: there is another fault, such as a missing permission.
    """
    with translated(path):
        absolute = os.path.abspath(path)
        files.make_folder(os.path.dirname(absolute))
        files.create_database(absolute)
        connection = sqlite3.connect(
            _name(absolute),
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            uri=True,
        )
        try:
            _identify_with_retries(connection, path, kind)
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("PRAGMA temp_store = MEMORY")
        except BaseException:
            connection.close()
            raise
        return connection


def _name(path: str) -> str:
    """Return the URI of a file, with a special mode for a user who can only read the file."""
    # SQLite reads a file that has a log as usual. Without a log, no process is writing, and SQLite
    # may not create the log. Therefore it must treat the file as immutable.
    uri = f"file:{urllib.parse.quote(path)}"
    if os.access(path, os.W_OK):
        return uri
    return f"{uri}?mode=ro" if os.path.exists(f"{path}-wal") else f"{uri}?mode=ro&immutable=1"


def _identify_with_retries(connection: sqlite3.Connection, path: str, kind: Format) -> None:
    """Identify the file. Retry while other processes are creating the file."""
    # SQLite waits for most locks itself, but not for the lock that enables the write-ahead log. The
    # connection already holds a shared lock, so it could wait forever.
    limit = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            _identify(connection, path, kind)
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > limit:
                raise
        time.sleep(random.uniform(*_RETRY_SECONDS))  # processes must not retry in step


def _identify(connection: sqlite3.Connection, path: str, kind: Format) -> None:
    # Use one transaction, because another process may create the file between two reads.
    connection.execute("BEGIN")
    try:
        version = _version(connection, path, kind)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if version == kind.version:
        return
    # Check again under the write lock, because another process may be creating the file.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection, path, kind)
        if version == 0:
            _execute(connection, kind.schema)
            connection.execute(f"PRAGMA application_id = {kind.application_id}")
        else:
            for older in range(version, kind.version):
                _execute(connection, kind.upgrades[older])
        connection.execute(f"PRAGMA user_version = {kind.version}")
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    _sync_folders(path)


def _sync_folders(path: str) -> None:
    """Make the names of a new file and its folder durable. SQLite syncs only contents."""
    folder = os.path.dirname(os.path.abspath(path))
    for name in (folder, os.path.dirname(folder)):
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            continue  # an unreadable folder is not a new folder
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _execute(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)


def _version(connection: sqlite3.Connection, path: str, kind: Format) -> int:
    """Return the version of a file of this kind, or 0 for an empty file."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if owner == 0 and version == 0 and tables == 0:
        return 0
    if owner != kind.application_id:
        raise NotAQdoDatabaseError(path=path, reason=f"not a {kind.name} file of qdo")
    if version > kind.version:
        raise DatabaseNewerError(path=path, found=version, known=kind.version)
    if not all(older in kind.upgrades for older in range(version, kind.version)):
        raise NotAQdoDatabaseError(path=path, reason=f"format {version} was never released")
    return int(version)


def sqlite_address_error(url: str) -> str | None:
    """Return the reason why a ``sqlite:PATH`` address is invalid, or None for a valid address."""
    path = sqlite_path(url) or ""
    shown = hide_credentials(url)
    if not path or path.endswith("/"):
        return f"it must name a file as sqlite:PATH, got {shown!r}"
    if path.startswith("//") or path == ":memory:" or "\0" in path:
        return f"it must name a file as sqlite:some/path or sqlite:/some/path, got {shown!r}"
    if path != path.encode(errors="replace").decode():
        return f"the path of its file must be UTF-8, got {shown!r}; rename the folder or the file"
    return None


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Convert the errors of sqlite3 and of the file system to qdo's errors."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(path, error) from error
    except UnicodeDecodeError as error:  # sqlite3 raises this error for a damaged schema
        raise DatabaseCorruptError(path=path, reason=str(error)) from error
    except OSError as error:
        raise DatabaseError(path=path, reason=error.strerror or str(error)) from error


def translate(path: str, error: sqlite3.Error) -> DatabaseError:
    """Translate an error of sqlite3."""
    code = error_code(error)
    if code == sqlite3.SQLITE_FULL:
        return DatabaseFullError(path=path, reason=str(error))
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DatabaseCorruptError(path=path, reason=str(error))
    if code == sqlite3.SQLITE_CANTOPEN:
        return DatabaseError(path=path, reason=f"{error}; check that the folder is writable")
    # SQLite reports an exceeded quota or file size limit with this code, not with SQLITE_FULL.
    if code == sqlite3.SQLITE_IOERR:
        reason = f"{error}; check free space, quotas, file size limits and the system log"
        return DatabaseError(path=path, reason=reason)
    return DatabaseError(path=path, reason=str(error))


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another connection holds the lock."""
    return error_code(error) == sqlite3.SQLITE_BUSY


class DamagedRowError(sqlite3.DatabaseError):
    """A row has values that qdo never stores. SQLite cannot detect this damage."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def error_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code, or 0 for an unknown code."""
    if str(error).startswith(_NOT_TEXT):  # an error of the sqlite3 module, without a code
        return sqlite3.SQLITE_CORRUPT
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


class ReplacedFileCheck:
    """Detects that the file at a path is no longer the open database.

    SQLite continues to write to a deleted file without an error. When the process ends, this data
    would be lost. The index of the log also holds the locks. If another program deleted the index,
    two processes would write at the same time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = {name: _identity(name) for name in (path, f"{path}-wal", f"{path}-shm")}

    def check(self) -> None:
        """Raise DatabaseReplacedError if the file, its log or the log's index was replaced."""
        for name, known in self._files.items():
            now = _identity(name)
            if known is None:
                self._files[name] = now
            elif now != known:
                change = "is missing" if now is None else "is now another file"
                raise DatabaseReplacedError(path=self._path, reason=f"{name} {change}")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
