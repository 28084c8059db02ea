"""How far a failure reaches is decided from classes and codes, never from texts."""

from __future__ import annotations

import ast
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from psycopg import errors

from qdo.broker_errors import PostgresqlRightsError, ThrottledError
from qdo.errors import FailureKind, QdoError, QueueLimitError
from qdo.postgresql.session import translated
from qdo.postgresql.url import postgresql_address
from qdo.refusals import failure_kind, send_each
from qdo.system.sqlite import DamagedRowError, translate
from tests.support.doc_pages import table
from tests.support.paths import ROOT, tree_of

ROW, LATER, ALL = FailureKind.REFUSED, FailureKind.BUSY, FailureKind.UNREACHABLE
ADDRESS = postgresql_address("postgresql://localhost/shop")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.CheckViolation, ROW),
        (errors.NumericValueOutOfRange, ROW),
        (errors.UntranslatableCharacter, ROW),
        (errors.RaiseException, ROW),
        (errors.ProgramLimitExceeded, ROW),
        (errors.LockNotAvailable, LATER),
        (errors.DeadlockDetected, LATER),
        (errors.SerializationFailure, LATER),
        (errors.QueryCanceled, LATER),
        (errors.AdminShutdown, ALL),
        (errors.DiskFull, ALL),
        (errors.TooManyConnections, ALL),
        (errors.InsufficientPrivilege, ALL),
        (errors.UndefinedTable, ALL),
        (errors.ReadOnlySqlTransaction, ALL),
        (errors.InvalidPassword, ALL),
        (psycopg.OperationalError, ALL),
        (psycopg.DataError, ROW),
    ],
)
def test_an_error_of_postgresql_has_one_kind(error: type[psycopg.Error], kind: FailureKind) -> None:
    """The driver's, SQLAlchemy's and qdo's error for it are of one kind."""
    found = error("Texte traduit")
    assert failure_kind(found) is kind
    assert failure_kind(sqlalchemy.exc.DBAPIError("SELECT", {}, found)) is kind
    if found.sqlstate is not None:
        assert failure_kind(translated(ADDRESS, found)) is kind


def sqlite_error(act: Callable[[sqlite3.Connection], object]) -> sqlite3.Error:
    connection = sqlite3.connect(":memory:")
    try:
        with pytest.raises(sqlite3.Error) as raised:
            act(connection)
        return raised.value
    finally:
        connection.close()


def wrapped(error: sqlite3.Error) -> QdoError:
    """Return qdo's error, raised from one of sqlite3."""
    found = translate("file.db", error)
    found.__cause__ = error
    return found


@pytest.mark.parametrize(
    ("statements", "kind"),
    [("CREATE TABLE t (a CHECK (a < 3)); INSERT INTO t VALUES (4)", ROW), ("SELECT FROM", ALL)],
)
def test_an_error_of_sqlite_has_one_kind(statements: str, kind: FailureKind) -> None:
    error = sqlite_error(lambda connection: connection.executescript(statements))
    assert failure_kind(error) is kind
    assert failure_kind(wrapped(error)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DamagedRowError("a text instead of a number"), ROW),
        (wrapped(DamagedRowError("a text instead of a number")), ROW),
        (QueueLimitError(queue="a", limit=1), ROW),
        (LookupError("no tenant"), ROW),
        (ThrottledError(service="SQS", action="Send", resource="a", reason="slow down"), ALL),
        (PostgresqlRightsError(server="s", role="r", reason="no", remedy="GRANT"), ALL),
        (ConnectionResetError(104, "reset"), ALL),
        (sqlalchemy.exc.TimeoutError("no connection is free"), ALL),
    ],
)
def test_other_errors_have_a_kind(error: Exception, kind: FailureKind) -> None:
    assert failure_kind(error) is kind


def test_rows_that_fail_concern_only_themselves() -> None:
    """Others keep their order; later rows of a busy queue wait, those of a refused one do not."""
    faults: dict[int, Exception] = {
        40: QueueLimitError(queue="q0", limit=1),
        300: errors.LockNotAvailable(),
    }
    sent: list[int] = []
    calls = 0

    def send(rows: Sequence[int]) -> list[str]:
        nonlocal calls
        calls += 1
        for row in rows:
            if row in faults:
                raise faults[row]
        sent.extend(rows)
        return [f"m{row}" for row in rows]

    def queue_of(row: int) -> str:
        return f"q{row % 4}"

    passage = send_each(range(500), send, queue_of)
    busy = [row for row in range(300, 500) if queue_of(row) == "q0"]
    assert sent == [row for row in range(500) if row not in (40, *busy)]
    assert passage.done == [(row, f"m{row}") for row in sent]
    assert passage.refused == [(40, faults[40])]
    assert [row for row, _ in passage.held] == busy
    assert passage.held[0] == (300, faults[300])
    assert calls < 40
    sent.clear()
    faults[20] = errors.AdminShutdown()
    passage = send_each(range(500), send, queue_of)
    assert passage.ended is faults[20]
    assert sent == [row for row, _ in passage.done] == [*range(len(sent))]
    assert len(sent) <= 20
    assert not passage.refused


# --- the table of loops -----------------------------------------------------------------

REPEATS = re.compile("retrying|trying again")
CALLS = {"failure_kind", "send_each", "until_answered"}


def repeats(path: Path) -> bool:
    """Return whether a file logs that it retries, or asks how far a failure reaches."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CALLS:
            return True
        values = node.args if isinstance(node, ast.Call) else [getattr(node, "value", None)]
        texts = [each.value for each in values if isinstance(each, ast.Constant)]
        is_text = isinstance(node, ast.Call | ast.Assign)  # in a log line, or a name for it
        if is_text and any(REPEATS.search(each) for each in texts if isinstance(each, str)):
            return True
    return False


def test_every_loop_that_repeats_is_in_the_table() -> None:
    """A new one says there what a refused row costs."""
    qdo = ROOT / "qdo"
    paths = [each for each in qdo.rglob("*.py") if each.parent.name not in ("programs", "qdo")]
    paths.append(qdo / "outbox.py")
    found = {each.relative_to(qdo).as_posix() for each in paths if repeats(each)}
    cells = table("developing", "loops")
    assert {each for cell in cells for each in re.findall(r"[\w/]+\.py", cell)} == found
