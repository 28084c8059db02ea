"""Uses that both type checkers refuse, each with the names of its errors in a comment.

The comment hides these errors only: `make lint` fails for another error, and for a comment without
its error.
"""

# pyright: standard, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import qdo
from qdo.dashboard import create_app
from qdo.testing import TestKit

app = qdo.App("shop")
missing = qdo.Mesage  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

# --- settings ---

qdo.App("a", atempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
qdo.App("a", attempts="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
qdo.Worker(app, brust=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
create_app(app.settings, anonymus=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
TestKit(app, fetch="7")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# --- options of jobs ---


def take(message: qdo.Message, context: object) -> None: ...


app.job(take)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
app.job("a", timeout=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
app.job("a", order="keys")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
app.job("a", order="key", batch=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
app.job("a", "message", pool=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
app.job("a", pool=True, batch=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


# --- functions of jobs ---


@app.job()  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def without_context(message: qdo.Message) -> None: ...


@app.job()  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
async def with_more(message: qdo.Message, context: object, more: int) -> None: ...


@app.job()  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def with_request(request: qdo.Request, context: object) -> None: ...


@app.job()  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def with_body(body: dict[str, Any], context: object) -> None: ...


@app.job(batch=5)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def with_message(message: qdo.Message, context: object) -> None: ...


@app.job(pool=True)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def with_batch(batch: qdo.Batch, context: object) -> None: ...


def keep_signatures(message: qdo.Message[int]) -> None:
    message.body.upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    with_job(message)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@app.job("kept")
def with_job(message: qdo.Message[int], context: object) -> None: ...


# --- hooks ---


@app.context  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def context_of_an_app(app: qdo.App) -> Iterator[int]:
    yield 1


@app.middleware  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def without_call(message: qdo.Message, context: object) -> None: ...


@app.middleware(jobs="async")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def with_def(call_next: Callable[..., Any], message: qdo.Message, context: object) -> None: ...


@app.failure  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def failed(event: qdo.Event) -> None: ...


@app.observer  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
def seen(message: qdo.Message) -> None: ...


# --- calls ---

app.send("a", 1, delay_second=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
app.request("a", 1, dleay_seconds=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
app.request_many([("a", 1)])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
app.handle("7").result(timeout=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def wait(handle: qdo.Handle) -> None:
    await app.asend("a", 1, delay=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await app.arequest("a", 1, keep=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await handle.acancel(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
