"""Coroutines send and ask within the transactions of their async connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from qdo.app import App
from qdo.errors import RequestNotFoundError, UsageError
from qdo.testing import TestKit

Connect = Callable[[str], AbstractAsyncContextManager[Any]]


@pytest.fixture
def app(postgresql_url: str) -> Iterator[App]:
    with App("shop", broker=postgresql_url) as made:
        yield made


@asynccontextmanager
async def _psycopg(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection


@asynccontextmanager
async def _asyncpg(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


def _connection(url: str, driver: str = "psycopg") -> Any:
    return create_async_engine(url.replace(":", f"+{driver}:", 1), poolclass=NullPool).connect()


def _session(url: str, driver: str = "psycopg") -> Any:
    return AsyncSession(create_async_engine(url.replace(":", f"+{driver}:", 1), poolclass=NullPool))


def _bodies(app: App, queue: str = "q") -> list[bytes]:
    return [row[1] for row in app.broker.reader(queue, 0).fetch(100)]


@pytest.mark.parametrize("connect", [_psycopg, _connection, _session])
def test_a_coroutine_sends_with_its_transaction(
    app: App, postgresql_url: str, connect: Connect
) -> None:
    """If a statement fails, the coroutine gets its error, and may use the connection again."""
    stream = app.stream("user", shards=1)

    async def book() -> list[str]:
        async with connect(postgresql_url) as connection:
            with pytest.raises(UsageError):
                await app.asend("q", {1}, connection=connection)
            await app.asend("q", 1, connection=connection)
            lost = await app.arequest("sum", [1], id="lost", connection=connection)
            with pytest.raises(Exception, match="another pool or body"):
                await app.arequest("sum", [2], id="lost", connection=connection)
            await connection.rollback()
            with pytest.raises(RequestNotFoundError):
                await lost.astate()
            sent = [await app.asend("q", 2, "k", priority=3, connection=connection)]
            sent += await app.asend_many([("q", 3), ("r", 4)], connection=connection)
            await stream.asend("ada", 5, connection=connection)
            asked = await app.arequest("sum", [2], tag={}, then="q", connection=connection)
            (other,) = await app.arequest_many([{"pool": "sum", "body": 3}], connection=connection)
            await app.asend("q", 0)  # it is stored before the open transaction
            await connection.commit()
            assert await asked.astate() == await other.astate() == "waiting"
        return sent

    sent = asyncio.run(book())
    assert _bodies(app) == [b"0", b"2", b"3"]
    assert _bodies(app, "r") == [b"4"]
    assert len(set(sent)) == 3


def test_connections_of_plain_code_are_refused(app: App, postgresql_url: str) -> None:
    """They would block the loop; and Django's alias means another connection in each thread."""
    with psycopg.connect(postgresql_url) as connection:
        for each in (connection, "default"):
            with pytest.raises(UsageError):
                asyncio.run(app.asend("q", 1, connection=each))
            with pytest.raises(UsageError):
                asyncio.run(app.arequest("sum", 1, connection=each))
    assert _bodies(app) == []


@pytest.mark.parametrize(
    "connect",
    [_asyncpg, lambda url: _session(url, "asyncpg"), lambda url: _connection(url, "asyncpg")],
)
def test_asyncpg_is_refused_by_name(app: App, postgresql_url: str, connect: Connect) -> None:
    async def book() -> None:
        async with connect(postgresql_url) as connection:
            with pytest.raises(UsageError) as caught:
                await app.asend("q", 1, connection=connection)
            assert "asyncpg" in caught.value.details["reason"].partition("got ")[2].split(";")[0]

    asyncio.run(book())
    assert _bodies(app) == []


@pytest.mark.parametrize("connect", [_psycopg, _session])
def test_the_kit_delivers_at_the_commit(bare_database_url: str, connect: Connect) -> None:
    app = App("kit")
    app.job("q")(lambda message, context: None)

    async def book() -> None:
        async with connect(bare_database_url) as connection:
            await app.asend("q", 1, connection=connection)
            await connection.rollback()
            await app.asend("q", 2, connection=connection)
            await connection.commit()

    with TestKit(app) as kit:
        asyncio.run(book())
        kit.run_until_settled()
        assert kit.done() == [2]
