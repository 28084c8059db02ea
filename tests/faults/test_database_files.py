"""Bad database files, full disks and missing permissions: one clear error, nothing lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.embedded.schema import MESSAGES
from qdo.brokers.registry import open_broker
from qdo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseNewerError,
    DatabaseReplacedError,
    NotAQdoDatabaseError,
    QueueNotEmptyError,
)
from qdo.system.sqlite import Format, open_database
from tests.support.forks.processes import run as run_process
from tests.support.paths import ROOT


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "messages.db")


def connect(path: str) -> Broker:
    return open_broker(f"sqlite:{path}", "app")


IMPORTS = """
import os, resource, sys
from qdo.brokers.embedded import broker as embedded
from qdo.brokers.base import Outgoing
from qdo.brokers.registry import open_broker
from qdo.errors import DatabaseError, QdoError
"""


def run(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> list[str]:
    argv = [*prefix, sys.executable, "-c", IMPORTS + code, *arguments]
    done = run_process(argv, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


# --- files that are not ours --------------------------------------------------------


def test_garbage_is_refused_and_kept(path: str) -> None:
    """A file that is not a database stays unchanged, byte for byte."""
    Path(path).write_bytes(os.urandom(20_000))
    before = Path(path).read_bytes()
    with pytest.raises(DatabaseCorruptError) as caught:
        connect(path)
    assert caught.value.details["path"] == path
    assert Path(path).read_bytes() == before


def test_another_programs_file_is_refused_and_kept(path: str) -> None:
    """An unrelated database, such as an address book, is not turned into a broker."""
    theirs = sqlite3.connect(path)
    theirs.execute("CREATE TABLE people (name)")
    theirs.commit()
    theirs.close()
    before = Path(path).read_bytes()
    with pytest.raises(NotAQdoDatabaseError):
        connect(path)
    assert Path(path).read_bytes() == before


def test_a_newer_qdos_file_is_refused(path: str) -> None:
    """An older program must not write to a format that it does not know."""
    newer = Format(MESSAGES.name, MESSAGES.application_id, MESSAGES.version + 1, MESSAGES.schema)
    open_database(path, newer).close()
    with pytest.raises(DatabaseNewerError) as caught:
        connect(path)
    assert caught.value.details["found"] == caught.value.details["known"] + 1


def test_damage_found_while_reading_is_reported(path: str) -> None:
    """A page overwritten in the middle of the file: the fetch raises an error, not garbage."""
    broker = connect(path)
    broker.send_many([Outgoing("q", b"%d" % number * 50) for number in range(5000)])
    broker.close()
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 4))
    broker = connect(path)
    with pytest.raises(DatabaseCorruptError) as caught:
        broker.reader("q", 0).fetch(5000)
    assert caught.value.details["path"] == path
    broker.close()


def test_a_damaged_schema_is_reported(path: str) -> None:
    """Also if its text is not UTF-8."""
    connect(path).close()
    content = Path(path).read_bytes()
    assert b"CREATE TABLE queues" in content
    Path(path).write_bytes(content.replace(b"CREATE TABLE queues (", b"CREATE TABLE queues \xb3"))
    with pytest.raises(DatabaseCorruptError) as caught:
        connect(path)
    assert caught.value.details["path"] == path


COLUMNS = {
    "file": ("node",),
    "queues": ("name", "head", "sent", "largest", "delayed"),
    "messages": ("position", "number", "body", "key", "headers"),
    "delayed": ("due", "id", "key", "headers", "body"),
    "dedup": ("id",),
    "dead_letters": (
        *("position", "body", "key", "headers", "error", "traceback", "attempts", "worker"),
        *("fence", "dead_at"),
    ),
}
"""Columns with a type that SQLite does not enforce."""


def use_everything(path: str) -> list[Exception]:
    """Call each operation of a broker; return the errors."""
    try:
        broker = connect(path)
    except Exception as error:  # noqa: BLE001 - the test judges it
        return [error]
    soon = SendOptions(due=1.0, dedup_key="d", dedup_seconds=60.0)
    late = SendOptions(due=4e9)
    operations: list[Callable[[], object]] = [
        lambda: broker.catalog.names(),
        lambda: broker.catalog.backlog("q", 0),
        lambda: broker.reader("q", 0).fetch(10),
        lambda: broker.dead_letters.records(),
        lambda: broker.dead_letters.find(),
        lambda: broker.dead_letters.counts(),
        lambda: broker.dead_letters.prune("q", keep=0, before=9e9),
        lambda: broker.listen(lambda _: None)(),
        lambda: broker.send(Outgoing("q", b"2")),
        lambda: broker.send(Outgoing("q", b"3", terms=soon)),
        lambda: broker.send(Outgoing("q", b"3", terms=late)),
        lambda: broker.dead_letters.retry([("q", 7)]),
        lambda: broker.trim("q", 2**62, 0.0),
        lambda: broker.delete_queue("q", 0),
    ]
    errors: list[Exception] = []
    for operation in operations:
        try:
            operation()
        except Exception as error:  # noqa: BLE001 - likewise
            errors.append(error)
    broker.close()
    return errors


@pytest.fixture
def filled(path: str) -> str:
    """A file with a row in each table."""
    broker = connect(path)
    now = time.time()
    broker.send_many(
        [
            Outgoing("q", b"1", "k", "{}"),
            Outgoing("q", b"2", "k", "{}", SendOptions(dedup_key="d", dedup_seconds=60.0)),
            Outgoing("q", b"3", "k", "{}", SendOptions(due=now + 1000)),
        ]
    )
    letter = DeadLetterRecord("q", 7, b"1", "k", "{}", "no", "", 1, "w", 1, 1.0)
    broker.dead_letters.store(letter)
    broker.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE delayed SET due = 1")  # is due
        connection.commit()
    return path


@pytest.mark.parametrize(
    ("table", "column"), [(table, each) for table, names in COLUMNS.items() for each in names]
)
def test_a_value_of_another_type_is_damage(
    filled: str, table: str, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite returns it as it is; every operation that reads it names the file."""
    with contextlib.closing(sqlite3.connect(filled)) as connection:
        other = "TEXT" if column == "body" else "BLOB"
        connection.execute(f"UPDATE {table} SET {column} = CAST({column} AS {other})")
        connection.commit()
    errors = use_everything(filled)
    logged = (each for record in caplog.records for each in record.args or ())
    errors += [each for each in logged if isinstance(each, Exception)]
    corrupt = [error for error in errors if isinstance(error, DatabaseCorruptError)]
    assert {error.details["path"] for error in corrupt} == {filled}
    others = [error for error in errors if error not in corrupt]
    assert all(isinstance(error, QueueNotEmptyError) for error in others), others


def test_text_that_is_not_utf8_is_damage(filled: str) -> None:
    """The sqlite3 module reports it without a code."""
    with contextlib.closing(sqlite3.connect(filled)) as connection:
        connection.execute("UPDATE messages SET key = CAST(x'ff' AS TEXT)")
        connection.commit()
    broker = connect(filled)
    with pytest.raises(DatabaseCorruptError):
        broker.reader("q", 0).fetch(10)
    broker.close()


def test_a_row_that_every_file_has_is_missing(filled: str) -> None:
    """The node of the file: without it there are no ids."""
    with contextlib.closing(sqlite3.connect(filled)) as connection:
        connection.execute("DELETE FROM file")
        connection.commit()
    with pytest.raises(DatabaseCorruptError):
        connect(filled)


# --- files that go away -------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_file_deleted_under_a_sender_is_an_error(path: str, suffix: str) -> None:
    """A send that no reader could ever see is not acknowledged."""
    broker = connect(path)
    broker.send(Outgoing("q", b"1"))
    os.unlink(path + suffix)
    with pytest.raises(DatabaseReplacedError) as caught:
        broker.send(Outgoing("q", b"2"))
    assert (path + suffix) in caught.value.details["reason"]
    broker.close()


def test_a_file_deleted_under_a_reader_is_an_error(path: str) -> None:
    """A worker does not wait forever at the tip of a deleted file."""
    broker = connect(path)
    broker.send(Outgoing("q", b"1"))
    reader = broker.reader("q", 0)
    assert len(reader.fetch(10)) == 1
    os.unlink(path)
    with pytest.raises(DatabaseReplacedError):
        reader.fetch(10)
    broker.close()


# --- permissions --------------------------------------------------------------------

_UNPRIVILEGED = """
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    open_broker("sqlite:" + sys.argv[1], "app").send(Outgoing("q", b"1"))
except QdoError as error:
    print(type(error).__name__, error.exit_code, error)
"""


@pytest.fixture
def passable() -> Iterator[Path]:
    """A folder that others may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="qdo-test-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def test_a_folder_without_write_permission(passable: Path) -> None:
    """The error names the path; its exit code is that of an unreachable broker."""
    folder = passable / "closed"
    folder.mkdir(mode=0o555)
    (line,) = run(_UNPRIVILEGED, str(folder / "messages.db"))
    assert line.startswith("DatabaseError 3 ")
    assert str(folder / "messages.db") in line


def test_a_folder_that_cannot_be_made(passable: Path) -> None:
    """The parent folder denies access: reported before anything is sent."""
    folder = passable / "closed"
    folder.mkdir(mode=0o555)
    (line,) = run(_UNPRIVILEGED, str(folder / "deeper" / "messages.db"))
    assert line.startswith("DatabaseError 3 ")
    assert "Permission denied" in line


def test_a_folder_that_may_be_entered_but_not_read(passable: Path) -> None:
    """Enough to work in, if the folder above it is closed to readers: no error."""
    folder = passable / "open"
    folder.mkdir()
    folder.chmod(0o733)
    assert run(_UNPRIVILEGED, str(folder / "messages.db")) == []


# --- no room ------------------------------------------------------------------------

_FILL = """
path, way = sys.argv[1:]
url = "sqlite:" + path
ballast = os.path.join(os.path.dirname(path), "ballast")
if way == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
else:
    with open(ballast, "wb") as file:
        file.write(bytes(300_000))
broker = open_broker(url, "app")
acknowledged = []
try:
    while True:
        number = len(acknowledged)
        acknowledged.append(broker.send(Outgoing("q", b"%d " % number + bytes(2000))))
except DatabaseError as error:
    print(type(error).__name__, error.exit_code, error)
try:
    broker.send_many([Outgoing("q", b"batch" + bytes(2000))] * 500)
except DatabaseError as error:
    print(type(error).__name__)
stored = [row[1].split()[0] for row in broker.reader("q", 0).fetch(100_000)]
print("same", len(stored) > 20, stored == [b"%d" % number for number in range(len(acknowledged))])

if way == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
else:
    os.unlink(ballast)
broker.send(Outgoing("q", b"again"))
broker.close()
broker = open_broker(url, "app")
bodies = [row[1].split()[0] for row in broker.reader("q", 0).fetch(100_000)]
print("after", bodies == [*stored, b"again"], broker.catalog.backlog("q", 0).count == len(bodies))
broker.close()
"""


def _may_mount() -> bool:
    """Whether a disk can be made for this test alone, in a mount namespace of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


WAYS = {"limit": "DatabaseError 3 "} | ({"disk": "DatabaseFullError 3 "} if _may_mount() else {})


@pytest.mark.parametrize("way", WAYS)
def test_no_room_during_send(tmp_path: Path, way: str) -> None:
    """A full disk, or a limit of file size: a send or a batch that did not fit is an error and
    leaves no trace. Acknowledged messages stay. When there is space again, sending works."""
    prefix: tuple[str, ...] = ()
    if way == "disk":
        mount = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$@"'
        prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    first, second, *rest = run(_FILL, str(tmp_path / "messages.db"), way, prefix=prefix)
    assert first.startswith(WAYS[way])
    assert second == WAYS[way].split()[0]
    assert rest == ["same True True", "after True True"]


_NO_ROOM_AT_ALL = """
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    open_broker("sqlite:" + sys.argv[1], "app")
except DatabaseError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
broker = open_broker("sqlite:" + sys.argv[1], "app")
broker.send(Outgoing("q", b"1"))
print(broker.catalog.names())
"""


def test_no_room_to_make_the_file(path: str) -> None:
    """Opening fails, and its leftovers do not disturb the next opening."""
    assert run(_NO_ROOM_AT_ALL, path) == ["DatabaseError", "['q']"]


def test_a_failed_open_leaves_nothing_open(path: str) -> None:
    """Trying again and again does not use up file descriptors."""
    Path(path).write_bytes(b"garbage " * 1000)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(DatabaseError):
            connect(path)
    assert len(os.listdir("/proc/self/fd")) == before
