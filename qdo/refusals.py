"""Classifies failures by the rows that they affect, for loops over rows of other programs.

=============  ====================================  ==========================================
kind           meaning                               a loop
=============  ====================================  ==========================================
refused        this row will not succeed as it is    sets it aside with the reason, and goes on
busy           this row may succeed later            leaves it, and later rows of its queue
unreachable    no row can succeed now                ends, and repeats all later
=============  ====================================  ==========================================

The kind depends on the class of the error and the codes of each store. The text of an error does
not matter, because servers translate texts. An unknown error, such as an error from the app's code
for a row, affects only this row.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qdo.errors import FailureKind, QdoError
from qdo.system.sqlite import DamagedRowError

__all__ = ["Passage", "failure_kind", "send_each", "sqlstate_kind"]

Row = TypeVar("Row")
Result = TypeVar("Result")

# SQLSTATEs of locks, of conflicts between transactions, and of terminated statements.
_BUSY_STATES = re.compile("40|55|57014")
# SQLSTATEs of errors about the server, the login, a right, or the schema.
_ALL_STATES = re.compile("08|25|3D|28|3F|42501|42P01|42883|53|57|58|F0|HV|XX")
_SQLITE_ROWS = (DamagedRowError, sqlite3.IntegrityError, sqlite3.DataError)
# Errors of other database drivers (PEP 249), and of SQLAlchemy's pool.
_UNREACHABLE_CLASSES = {"OperationalError", "InterfaceError", "InternalError", "TimeoutError"}


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of a failure, which tells the affected rows."""
    if isinstance(error, QdoError):
        if not isinstance(error.__cause__, sqlite3.Error):
            return error.kind
        error = error.__cause__  # the class covers errors of files and of single rows
    error = getattr(error, "orig", None) or error  # SQLAlchemy wraps the errors of drivers
    if isinstance(error, sqlite3.Error):
        of_row = isinstance(error, _SQLITE_ROWS)
        return FailureKind.REFUSED if of_row else FailureKind.UNREACHABLE
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        return sqlstate_kind(state)
    names = {each.__name__ for each in type(error).__mro__}
    if isinstance(error, OSError | MemoryError) or names & _UNREACHABLE_CLASSES:
        return FailureKind.UNREACHABLE
    return FailureKind.REFUSED


def sqlstate_kind(state: str) -> FailureKind:
    if _BUSY_STATES.match(state):
        return FailureKind.BUSY
    return FailureKind.UNREACHABLE if _ALL_STATES.match(state) else FailureKind.REFUSED


@dataclass(slots=True)
class Passage(Generic[Row, Result]):
    """The rows of `send_each`, by their outcome.

    :ivar done: sent rows, with their results.
    :ivar refused: refused rows, with their errors.
    :ivar held: rows to retry later, with the error. Later rows of the same queue have None.
    :ivar ended: the reason why no row can succeed now. The caller retries all rows that are in none
        of the lists later.
    """

    done: list[tuple[Row, Result]] = field(default_factory=list)
    refused: list[tuple[Row, Exception]] = field(default_factory=list)
    held: list[tuple[Row, Exception | None]] = field(default_factory=list)
    ended: Exception | None = None


def send_each(
    rows: Sequence[Row],
    send: Callable[[Sequence[Row]], Sequence[Result]],
    queue_of: Callable[[Row], str],
) -> Passage[Row, Result]:
    """Send rows in order, as many at once as possible. A failing row affects no other queue.

    :param send: a function that sends all rows or none, and returns a result for each row. After an
        error, it gets the rows in halves.
    """
    passage = Passage[Row, Result]()
    waiting = [list(rows)]
    while waiting and passage.ended is None:
        held = {queue_of(row) for row, _ in passage.held}
        some = waiting.pop()
        passage.held += [(row, None) for row in some if queue_of(row) in held]
        if not (some := [row for row in some if queue_of(row) not in held]):
            continue
        try:
            passage.done += zip(some, send(some), strict=True)
        except Exception as error:  # noqa: BLE001 - each store raises what its library raises
            kind = failure_kind(error)
            middle = len(some) // 2
            if kind is FailureKind.UNREACHABLE:
                passage.ended = error
            elif middle:
                waiting += [some[middle:], some[:middle]]
            elif kind is FailureKind.BUSY:
                passage.held.append((some[0], error))
            else:
                passage.refused.append((some[0], error))
    return passage
