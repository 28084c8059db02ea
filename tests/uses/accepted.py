"""Uses of the public API that mypy --strict and pyright accept. `make lint` checks them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, assert_type

import qdo
from qdo.dashboard import create_app
from qdo.testing import TestKit


class OrderPlaced:
    """A body."""

    order: int


class Warehouse:
    """A context."""


app = qdo.App("shop", attempts=3, queues=["order-*"], backoff_seconds=1, broker="sqlite:m.db")
create_app(app.settings, anonymous=True, hosts=("localhost",), pause_seconds=2)


# --- jobs ---


@app.job("order-*", "message", policy=qdo.Policy(attempts=3), body=OrderPlaced, kind="placed")
def take(message: qdo.Message[OrderPlaced], context: Warehouse) -> None:
    assert_type(message.body, OrderPlaced)


@app.job("any-*", order="key", concurrency=4, limits=["crm"])
async def take_any(message: qdo.Message, context: object) -> None:
    assert_type(message.body, Any)


@app.job("many-*", batch=500, batch_wait_seconds=1, order="none")
async def take_many(batch: qdo.Batch[OrderPlaced], context: Warehouse) -> None:
    assert_type(batch[0].body, OrderPlaced)


@app.job("invoice", pool=True, executor="process", memory_mib=500)
def invoice(request: qdo.Request[OrderPlaced], context: Warehouse) -> str:
    request.progress(0.5)
    assert_type(request.body, OrderPlaced)
    return str(request.body.order)


@app.job("plain-*", pool=True)
async def invoice_plain(message: qdo.Message, context: Warehouse, extra: int = 0) -> int:
    return extra


async def keep(message: qdo.Message[OrderPlaced], request: qdo.Request[OrderPlaced]) -> None:
    """Call jobs, which stay the functions that they are."""
    assert_type(request.pause("when?", type=OrderPlaced), OrderPlaced)
    assert_type(request.pause(), Any)
    assert_type(await request.apause("when?", type=OrderPlaced), OrderPlaced)
    assert_type(invoice(request, context=Warehouse()), str)
    assert_type(await invoice_plain(message, Warehouse(), extra=1), int)


# --- hooks ---


@app.context
def generated() -> Generator[Warehouse]:
    yield Warehouse()


other = qdo.App("other", job_context=contextmanager(generated))


@app.middleware
def around(call_next: Callable[[Any, Any], Any], message: qdo.Message, context: Warehouse) -> None:
    call_next(message, context)


@app.middleware(jobs="async")
async def around_async(
    call_next: Callable[[qdo.Message, Warehouse], Awaitable[Any]],
    message: qdo.Message,
    context: Warehouse,
) -> None:
    await call_next(message, context)


@app.failure
def failed(message: qdo.Message, context: Warehouse, error: BaseException) -> None: ...


@app.observer
def seen(event: qdo.Event) -> None: ...


async_hooks = qdo.App("hooks")


@async_hooks.context
async def pool() -> AsyncGenerator[Warehouse, None]:
    yield Warehouse()


@async_hooks.failure
async def failed_async(message: qdo.Message, context: Warehouse, error: BaseException) -> None: ...


@async_hooks.observer
async def seen_async(event: qdo.Event) -> None: ...


# --- calls ---


async def call(message: qdo.Message) -> None:
    """Send, ask and look."""
    assert_type(app.send("a", {"n": 1}, "key", delay_seconds=1.5, once=message), str)
    assert_type(await app.asend("a", {"n": 1}, delay_seconds=1), str)
    assert_type(await app.asend_many([("a", 1)], connection=object()), list[str])
    assert_type(app.send_many([("a", 1), {"queue": "a", "body": 1}]), list[str])
    assert_type(app.request_many([{"pool": "invoice", "body": 1}]), list[qdo.Handle])
    handle = await app.arequest("invoice", 1, id="7", then=app.stream("users"), delay_seconds=3)
    assert_type(handle, qdo.Handle)
    assert_type(await handle.astate(), str)
    assert_type(handle.result(), Any)
    assert_type(handle.result(type=OrderPlaced), OrderPlaced)
    assert_type(await handle.aresult(5, type=list[int]), list[int])
    assert_type(app.owner("a"), qdo.Owner | None)
    assert_type(app.peek("a", kind="delayed"), list[qdo.PeekedMessage])
    assert_type(await app.apeek("a", kind="delayed"), list[qdo.PeekedMessage])
    with app.exclusive("a-*") as section:
        assert_type(section, qdo.Section)
    async with app.lock("report") as lock:
        assert_type(lock, qdo.HeldLock)
    assert_type(qdo.Worker(app, burst=True, queues=("a", "b")).run(), int)
    with TestKit(app, attempts=1) as kit:
        assert_type(kit.send("a", 1, dedup_key="x"), str)
