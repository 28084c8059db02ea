"""Reading rows of the file with the types that their columns have.

SQLite stores a value of any type in any column. In a damaged file a number may be a text, and the
code behind the query would fail at some later place. So every query names the types that it
expects, and another type is reported as damage, like what SQLite finds itself.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from qdo.system.sqlite import DamagedRowError

Kind = frozenset[type]
"""The types that a column may have."""

INTEGER: Kind = frozenset({int})
MAYBE_INTEGER: Kind = frozenset({int, NoneType})
REAL: Kind = frozenset({float})
TEXT: Kind = frozenset({str})
MAYBE_TEXT: Kind = frozenset({str, NoneType})
BLOB: Kind = frozenset({bytes})

Parameters = Sequence[Any] | Mapping[str, Any]
Row = tuple[Any, ...]


class Query:
    """A SELECT with the types of its columns.

    Its methods raise `sqlite3.Error`, which `qdo.system.sqlite.translated` converts to errors of
    the file: DatabaseCorruptError for a value of another type.
    """

    __slots__ = ("_kinds", "_known", "sql")

    def __init__(self, sql: str, *kinds: Kind) -> None:
        self.sql = sql
        self._kinds = tuple(enumerate(kinds))
        self._known: set[tuple[type, ...]] = set()  # right types of whole rows

    def all(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> list[Row]:
        """Return all rows."""
        rows: list[Row] = connection.execute(self.sql, parameters).fetchall()
        return self.checked(rows)

    def checked(self, rows: Iterable[Row]) -> list[Row]:
        """Return rows; raise the error if one has another type."""
        return list(map(self._checked, rows))

    def each(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> Generator[Row]:
        """Yield the rows one by one, for callers that do not read all."""
        with contextlib.closing(connection.execute(self.sql, parameters)) as cursor:
            yield from map(self._checked, cursor)

    def first(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> Row | None:
        """Return the first row, None if there is none."""
        row: Row | None = connection.execute(self.sql, parameters).fetchone()
        return None if row is None else self._checked(row)

    def only(self, connection: sqlite3.Connection, parameters: Parameters = ()) -> Row:
        """Return the first row, which every intact file has."""
        row = self.first(connection, parameters)
        if row is None:
            raise DamagedRowError("a row that every file has is missing")
        return row

    def _checked(self, row: Row) -> Row:
        if tuple(map(type, row)) in self._known:
            return row
        for column, kind in self._kinds:
            if type(row[column]) not in kind:
                names = " or ".join(sorted(each.__name__ for each in kind))
                found = type(row[column]).__name__
                raise DamagedRowError(f"a stored value must be {names}, got {found}")
        self._known.add(tuple(map(type, row)))
        return row
