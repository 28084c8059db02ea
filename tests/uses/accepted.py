"""Uses of the public API that mypy --strict and pyright accept. `make lint` checks it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, assert_type

import qdo
from qdo.dashboard import close_app, create_app
from qdo.testing import TestKit


@dataclass
class OrderPlaced:
    """A body."""

    order: int


@dataclass
class Warehouse:
    """A context."""

    name: str


app = qdo.App("shop", attempts=3, queues=["order-*"], backoff_seconds=1, broker="sqlite:m.db")


# --- jobs ---


@app.job("order-*", "message", policy=qdo.Policy(attempts=3), timeout_seconds=2)
def take(message: qdo.Message[OrderPlaced], context: Warehouse) -> None:
    """Take the type of the body and that of the context."""
    assert_type(message.body, OrderPlaced)
    assert_type(message.body.order, int)
    assert_type(message.id, str)


@app.job("order-*", "message", body=OrderPlaced, kind="again")
def take_again(message: qdo.Message[OrderPlaced], context: object) -> None:
    """Take one of the kinds of a queue."""


@app.job("any-*", order="key", concurrency=4, limits=["crm"])
async def take_any(message: qdo.Message, context: object) -> None:
    """Take a message with any body."""
    assert_type(message.body, Any)


@app.job("many-*", batch=500, batch_wait_seconds=1, order="none")
def take_many(batch: qdo.Batch[OrderPlaced], context: Warehouse) -> None:
    """Take a batch."""
    for message in batch:
        assert_type(message.body, OrderPlaced)


@app.job("invoice", pool=True, executor="process", memory_mib=500)
def invoice(request: qdo.Request[OrderPlaced], context: Warehouse) -> str:
    """Return a result."""
    request.progress(0.5)
    return str(request.body.order)


@app.job("invoice-*", pool=True)
async def invoice_async(request: qdo.Request[OrderPlaced], context: Warehouse) -> str:
    """Return a result from a coroutine."""
    await request.aprogress("half")
    return str(request.body.order)


@app.job("plain-*", pool=True)
def invoice_plain(message: qdo.Message[OrderPlaced], context: Warehouse, extra: int = 0) -> int:
    """Take a request as the message that it is."""
    return message.body.order


def keep_signatures(message: qdo.Message[OrderPlaced], request: qdo.Request[OrderPlaced]) -> None:
    """Call jobs, which stay the functions that they are."""
    assert_type(take(message=message, context=Warehouse("a")), None)
    assert_type(invoice(request, context=Warehouse("a")), str)
    assert_type(invoice_plain(request, Warehouse("a"), extra=1), int)


async def read_results(request: qdo.Request[OrderPlaced]) -> None:
    """Name the types of results and answers, or get JSON."""
    handle = app.request("invoice", OrderPlaced(1), kind="again")
    assert_type(handle.result(type=OrderPlaced), OrderPlaced)
    assert_type(await handle.aresult(5, type=list[int]), list[int])
    assert_type(handle.result(), Any)
    assert_type(request.pause("when?", type=OrderPlaced), OrderPlaced)
    assert_type(request.pause(), Any)


# --- hooks ---


@app.context
def shop() -> Iterator[Warehouse]:
    """Yield the context."""
    yield Warehouse("a")


@contextmanager
def managed() -> Generator[Warehouse]:
    """Yield the context, as a context manager."""
    yield Warehouse("a")


other = qdo.App("other", job_context=managed)


@app.middleware
def around(call_next: Callable[[Any, Any], Any], message: qdo.Message, context: Warehouse) -> None:
    """Run around every job."""
    call_next(message, context)


@app.middleware(jobs="sync")
def around_sync(call_next: Callable[[Any, Any], Any], message: Any, context: Warehouse) -> None:
    """Run around jobs with ``def``."""
    call_next(message, context)


@app.middleware(jobs="async")
async def around_async(
    call_next: Callable[[qdo.Message, Warehouse], Awaitable[Any]],
    message: qdo.Message,
    context: Warehouse,
) -> None:
    """Run around jobs with ``async def``."""
    await call_next(message, context)


@app.failure
def failed(message: qdo.Message, context: Warehouse, error: BaseException) -> None:
    """See a failed attempt."""


@app.observer
def seen(event: qdo.Event) -> None:
    """See an attempt."""
    assert_type(event.queue, str)


@qdo.App("async").context
async def pool() -> AsyncGenerator[Warehouse, None]:
    """Yield the context of async jobs."""
    yield Warehouse("a")


async_hooks = qdo.App("hooks")


@async_hooks.failure
async def failed_async(message: qdo.Message, context: Warehouse, error: BaseException) -> None:
    """See a failed attempt."""


@async_hooks.observer
async def seen_async(event: qdo.Event) -> None:
    """See an attempt."""


# --- calls ---


def send(message: qdo.Message) -> None:
    """Send, ask and look."""
    assert_type(app.send("a", {"n": 1}, "key", delay_seconds=1.5, once=message), str)
    assert_type(app.send_many([("a", 1), {"queue": "a", "body": 1}]), list[str])
    handle = app.request("invoice", 1, id="7", then=app.stream("users"), events=True)
    assert_type(handle, qdo.Handle)
    assert_type(handle.state, str)
    assert_type(handle.result(), Any)
    assert_type(handle.result(type=OrderPlaced).order, int)
    assert_type(app.request_many([{"pool": "invoice", "body": 1}]), list[qdo.Handle])
    assert_type(app.owner("a"), qdo.Owner | None)
    assert_type(app.peek("a", kind="delayed"), list[qdo.PeekedMessage])
    assert_type(app.stream("users"), qdo.Stream)
    with app.lock("report") as lock, app.exclusive("a-*") as section:
        assert_type(lock, qdo.HeldLock)
        assert_type(section, qdo.Section)
    assert_type(qdo.Worker(app, burst=True, queues=("a", "b")).run(), int)


async def asend() -> None:
    """Do the same in a coroutine."""
    assert_type(await app.asend("a", {"n": 1}, delay_seconds=1), str)
    handle = await app.arequest("invoice", 1, delay_seconds=3)
    assert_type(handle, qdo.Handle)
    assert_type(await handle.astate(), str)
    assert_type(await handle.aresult(type=OrderPlaced), OrderPlaced)
    assert_type(await handle.acancel(reason="late"), bool)
    assert_type(await app.apeek("a", kind="delayed"), list[qdo.PeekedMessage])
    assert_type(await app.asend_many([("a", 1)], connection=object()), list[str])
    async with app.lock("report") as lock:
        assert_type(lock, qdo.HeldLock)


def show() -> None:
    """Make a dashboard."""
    close_app(create_app(app.settings, anonymous=True, hosts=("localhost",), pause_seconds=2))


def test_jobs() -> None:
    """Test jobs with the kit."""
    with TestKit(app, attempts=1) as kit:
        assert_type(kit.send("a", 1, dedup_key="x"), str)
