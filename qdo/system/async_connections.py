"""Runs plain code on the connection of a coroutine, which awaits each statement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from qdo.errors import UsageError

_Result = TypeVar("_Result")


class AwaitedConnection:
    """A `psycopg.AsyncConnection` for the plain code that `run_within` runs.

    :ivar driver: the connection of the coroutine.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def execute(self, statement: Any, parameters: Any) -> _AwaitedCursor:
        """Execute a statement; return a cursor of tuples."""
        import psycopg.rows

        cursor = self.driver.cursor(row_factory=psycopg.rows.tuple_row)
        _wait(cursor.execute(statement, parameters))
        return _AwaitedCursor(cursor)


class _AwaitedCursor:
    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def fetchone(self) -> Any:
        return _wait(self._cursor.fetchone())


async def run_within(connection: Any, function: Callable[[Any], _Result]) -> _Result:
    """Call a function with the plain form of a connection, without blocking the loop.

    :param connection: a `psycopg.AsyncConnection`, or an AsyncSession or AsyncConnection of
        SQLAlchemy.
    :raises UsageError: the connection is another one. Django's connections belong to a thread.
    """
    run_sync: Callable[[Callable[[Any], _Result]], Any] | None
    run_sync = getattr(connection, "run_sync", None)  # SQLAlchemy's own
    if run_sync is not None:
        result: _Result = await run_sync(function)
        return result
    psycopg: Any = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        plain = AwaitedConnection(connection)
        return await _in_greenlet(lambda: function(plain))
    library = type(connection).__module__.partition(".")[0]
    raise UsageError(
        reason="the connection of a coroutine must be an AsyncSession or AsyncConnection of "
        "SQLAlchemy with postgresql+psycopg://, or an AsyncConnection of psycopg, got "
        f"{library}'s {type(connection).__name__}; in plain code, as in a function for "
        "sync_to_async, call send or request"
    )


async def _in_greenlet(function: Callable[[], _Result]) -> _Result:
    """Run a function in a greenlet, and await here what it passes to `_wait`."""
    from greenlet import getcurrent, greenlet

    own = getcurrent()
    other = greenlet(function)
    other.gr_context = own.gr_context
    passed: Any = other.switch()
    while not other.dead:
        try:
            value = await passed
        except BaseException as error:  # noqa: BLE001 - the function handles it
            passed = other.throw(error)
        else:
            passed = other.switch(value)
    result: _Result = passed
    return result


def _wait(awaitable: Any) -> Any:
    """Switch to the coroutine of `_in_greenlet`; return the result of the awaitable."""
    from greenlet import getcurrent

    parent: Any = getcurrent().parent
    return parent.switch(awaitable)
