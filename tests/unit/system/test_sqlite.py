"""Opening SQLite files: they are created once, recognized, and rejected if foreign."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import qdo
from qdo.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseFullError,
    DatabaseNewerError,
    DatabaseReplacedError,
    NotAQdoDatabaseError,
)
from qdo.system import sqlite as storage
from qdo.system.sqlite import Format, ReplacedFileCheck, open_database, translate, translated

KIND = Format(
    "test", 0x71640001, 1, "CREATE TABLE a (x); CREATE TABLE b (y); INSERT INTO b VALUES (7)"
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "folder" / "file.db")


def content(path: str, kind: Format = KIND) -> list[tuple[int]]:
    """Open a file; return what its second table holds."""
    with contextlib.closing(open_database(path, kind)) as connection:
        return connection.execute("SELECT y FROM b").fetchall()


def test_a_missing_file_is_made_with_its_folders_and_tables(path: str) -> None:
    """The schema runs once, and its inserted rows are there at every later opening."""
    open_database(path, KIND).close()
    assert content(path) == [(7,)]


def test_processes_may_make_the_file_at_the_same_time(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is about to turn the write-ahead log on, as this one is."""
    Path(path).parent.mkdir(parents=True)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.execute("ROLLBACK")

    monkeypatch.setattr(storage.time, "sleep", pause)
    assert content(path) == [(7,)]
    assert len(pauses) == 3
    other.close()


@pytest.mark.parametrize(("durable", "synchronous"), [(True, 2), (False, 1)])
def test_settings_are_safe(path: str, durable: bool, synchronous: int) -> None:
    """Write-ahead log, and a sync at every commit unless the caller does without."""
    connection = open_database(path, KIND, durable=durable)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    connection.close()


@pytest.mark.parametrize("name", ["file:x.db", "file:x.db?mode=memory", ":memory:", "a b%20.db"])
def test_no_name_is_taken_for_anything_but_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some builds of SQLite read URIs, and one with mode=memory keeps nothing."""
    monkeypatch.chdir(tmp_path)
    open_database(name, KIND).close()
    assert (tmp_path / name).stat().st_size > 0


def test_an_older_file_is_upgraded_step_by_step(path: str) -> None:
    """Each version by its own statements, and only once; a gap is rejected."""
    open_database(path, KIND).close()
    upgrades = {1: "INSERT INTO b VALUES (8); INSERT INTO b VALUES (9)", 2: "DELETE FROM b"}
    second = Format("test", KIND.application_id, 2, "", {1: upgrades[1]})
    for _ in range(2):
        assert content(path, second) == [(7,), (8,), (9,)]
    with pytest.raises(NotAQdoDatabaseError):
        open_database(path, Format("test", KIND.application_id, 4, "", {1: "", 3: ""}))
    with pytest.raises(DatabaseNewerError):
        open_database(path, KIND)
    assert content(path, Format("test", KIND.application_id, 3, "", upgrades)) == []


def test_an_upgrade_that_fails_changes_nothing(path: str) -> None:
    """The file keeps its old version and its content."""
    open_database(path, KIND).close()
    with pytest.raises(DatabaseError):
        open_database(
            path,
            Format("test", KIND.application_id, 2, "", {1: "DELETE FROM b; DELETE FROM missing"}),
        )
    assert content(path) == [(7,)]


def test_an_empty_file_is_filled(path: str) -> None:
    """A touched file contains nothing that could be lost."""
    os.makedirs(os.path.dirname(path))
    Path(path).touch()
    assert content(path) == [(7,)]


def test_a_file_for_another_purpose_is_refused(path: str) -> None:
    """One of qdo's files under the wrong name is not written to."""
    open_database(path, KIND).close()
    with pytest.raises(NotAQdoDatabaseError, match="other"):
        open_database(path, Format("other", 0x71640002, 1, "CREATE TABLE c (z)"))


def test_another_programs_file_is_refused_and_kept(path: str) -> None:
    """A SQLite file without qdo's mark stays byte for byte as it was."""
    os.makedirs(os.path.dirname(path))
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    before = Path(path).read_bytes()
    with pytest.raises(NotAQdoDatabaseError):
        open_database(path, KIND)
    assert Path(path).read_bytes() == before


def test_a_newer_format_is_refused(path: str) -> None:
    """The message states both versions."""
    newer = Format(KIND.name, KIND.application_id, 9, KIND.schema)
    open_database(path, newer).close()
    with pytest.raises(DatabaseNewerError) as caught:
        open_database(path, KIND)
    assert caught.value.details == {"path": path, "found": 9, "known": 1}


def test_a_file_that_is_no_database_is_refused_and_kept(path: str) -> None:
    """Garbage is reported as damage, and left for an operator to restore."""
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(b"this is a letter to my aunt\n" * 400)
    with pytest.raises(DatabaseCorruptError):
        open_database(path, KIND)
    assert Path(path).read_bytes() == b"this is a letter to my aunt\n" * 400


def test_a_folder_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    """The message names the folder."""
    with pytest.raises(DatabaseError, match=str(tmp_path)):
        open_database(str(tmp_path), KIND)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """An error of the file system becomes one of qdo's."""
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseError, match=r"directory|exists"):
        open_database(str(tmp_path / "file" / "x.db"), KIND)


_OPEN = """
import sys
from qdo.system.sqlite import Format, open_database
sys.stdin.readline()
kind = Format("test", 0x71640001, 1, sys.argv[2])
print(open_database(sys.argv[1], kind).execute("SELECT count(*) FROM b").fetchone()[0])
"""


def test_processes_that_make_the_file_at_once_agree(path: str) -> None:
    """Of eight that start together one makes the tables, and all find them."""
    root = os.path.dirname(os.path.dirname(qdo.__file__))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _OPEN, path, KIND.schema],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        for _ in range(8)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=60)[0].strip() for child in children]
    assert answers == ["1"] * 8


def _error(code: int, text: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "text", "expected", "words"),
    [
        (13, "database or disk is full", DatabaseFullError, "disk space"),
        (11, "database disk image is malformed", DatabaseCorruptError, "restore"),
        (26, "file is not a database", DatabaseCorruptError, "restore"),
        (14, "unable to open database file", DatabaseError, "folder"),
        (778, "disk I/O error", DatabaseError, "quotas"),
        (8, "attempt to write a readonly database", DatabaseError, "readonly"),
    ],
)
def test_sqlites_errors_say_what_to_do(
    code: int, text: str, expected: type[DatabaseError], words: str
) -> None:
    """Each result code that an operator meets has its own error with a remedy."""
    made = translate("/a/b.db", _error(code, text))
    assert type(made) is expected
    assert words in str(made)
    assert "/a/b.db" in str(made)


def test_translated_keeps_the_cause() -> None:
    """The original error stays reachable for the log."""
    with pytest.raises(DatabaseError) as caught, translated("f"):
        raise PermissionError(13, "Permission denied")
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_removed_file_is_noticed(path: str, suffix: str) -> None:
    """SQLite itself would continue to write to a file that cannot be opened again."""
    connection = open_database(path, KIND)
    connection.execute("INSERT INTO a VALUES (1)")
    watch = ReplacedFileCheck(path)
    watch.check()
    os.unlink(path + suffix)
    with pytest.raises(DatabaseReplacedError, match=re.escape(path + suffix)):
        watch.check()
    connection.close()


def test_a_replaced_file_is_noticed(path: str) -> None:
    """Another file under the same name is not the one that was opened."""
    connection = open_database(path, KIND)
    watch = ReplacedFileCheck(path)
    os.rename(path, path + ".old")
    Path(path).touch()
    with pytest.raises(DatabaseReplacedError):
        watch.check()
    connection.close()


def test_a_new_file_survives_a_power_cut(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder and the folder around that are synced when it is made, and not again later."""
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    open_database(path, KIND).close()
    open_database(path, KIND).close()
    folder = Path(path).resolve().parent
    assert synced == [str(folder), str(folder.parent)]
