"""``async def`` jobs, one for each library in the table of docs/async.rst.

The environment variable DATABASE is the address of a database of PostgreSQL. Each job fails if its
library blocks the loop, or does not work.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiosqlite
import anyio
import httpx
import psycopg
import pytest
import sqlalchemy as sa
from asgiref.sync import sync_to_async
from sqlalchemy.ext.asyncio import create_async_engine

import qdo
from qdo import Message

DATABASE = os.environ["DATABASE"]
app = qdo.App("desk", attempts=1)
# Django and asyncpg have no types.
asyncpg: Any = importlib.import_module("asyncpg")
files = {"ENGINE": "django.db.backends.sqlite3", "NAME": "orders.db"}
importlib.import_module("django.conf").settings.configure(DATABASES={"default": files})
db: Any = importlib.import_module("django.db")


def check_thread(native_id: int) -> None:
    """Fail if code ran on the thread of the loop, where it would block all coroutines."""
    assert native_id != threading.get_native_id()


async def use_threads() -> None:
    check_thread(await asyncio.to_thread(threading.get_native_id))
    with ThreadPoolExecutor(2) as pool:
        loop = asyncio.get_running_loop()
        check_thread(await loop.run_in_executor(pool, threading.get_native_id))
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(threading.get_native_id()))
    thread.start()
    await asyncio.to_thread(thread.join)
    check_thread(found[0])


async def use_anyio() -> None:
    check_thread(await anyio.to_thread.run_sync(threading.get_native_id))
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, 0.01)


async def use_django() -> None:
    """Use what its ORM uses; the tests of Django have the ORM in jobs."""
    check_thread(await sync_to_async(threading.get_native_id)())
    row = await sync_to_async(lambda: db.connection.cursor().execute("SELECT 7").fetchone())()
    assert row == (7,)
    await sync_to_async(db.connections.close_all)()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nhere")
    writer.close()


async def use_httpx() -> None:
    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as site,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        address = f"http://localhost:{site.sockets[0].getsockname()[1]}"
        replies = await asyncio.gather(*(client.get(address) for _ in range(5)))
    assert [each.text for each in replies] == ["here"] * 5


async def use_engine(address: str) -> None:
    engine = create_async_engine(address)
    async with engine.begin() as session:
        assert await session.scalar(sa.text("SELECT 7")) == 7
    await engine.dispose()


async def use_sqlalchemy() -> None:
    await use_engine("sqlite+aiosqlite:///orders.db")
    for driver in ("psycopg", "asyncpg"):
        await use_engine(DATABASE.replace(":", f"+{driver}:", 1))


async def use_asyncpg() -> None:
    found = await asyncpg.connect(DATABASE)
    assert await found.fetchval("SELECT 7") == 7
    await found.close()


async def use_psycopg() -> None:
    async with await psycopg.AsyncConnection.connect(DATABASE) as found:
        row = await (await found.execute("SELECT 7")).fetchone()
    assert row == (7,)


async def use_aiosqlite() -> None:
    async with aiosqlite.connect("orders.db") as found:
        await found.create_function("thread", 0, threading.get_native_id)
        async with found.execute("SELECT thread()") as rows:
            row = await rows.fetchone()
    assert row is not None
    check_thread(row[0])


async def use_programs() -> None:
    pipe = asyncio.subprocess.PIPE
    cat = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    assert (await cat.communicate(b"text"))[0] == b"text"
    failed = await asyncio.create_subprocess_shell("echo no >&2; exit 3", stderr=pipe)
    assert (await failed.communicate())[1] == b"no\n"
    assert failed.returncode == 3
    endless = await asyncio.create_subprocess_exec("sleep", "1000")
    endless.terminate()
    assert await endless.wait() == -15
    with pytest.raises(FileNotFoundError):
        await asyncio.create_subprocess_exec("no-such-program", stdout=pipe)


USES = {
    "asyncio.to_thread": use_threads,
    "anyio": use_anyio,
    "Django": use_django,
    "httpx": use_httpx,
    "SQLAlchemy": use_sqlalchemy,
    "asyncpg": use_asyncpg,
    "psycopg": use_psycopg,
    "aiosqlite": use_aiosqlite,
    "asyncio.create_subprocess_exec": use_programs,
}


@app.job("*", order="none", concurrency=8)
async def use(message: Message, context: object) -> None:
    await USES[message.queue]()
    with open("out", "a") as file:
        print(message.queue, 0, message.attempt, os.getpid(), file=file)
