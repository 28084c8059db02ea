"""Uses that both type checkers refuse, each with the names of its errors in a comment.

The comment hides these errors only: `make lint` fails for another error, and for a comment without
its error.
"""

# pyright: standard, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import qdo
from qdo.dashboard import create_app
from qdo.testing import TestKit

from . import accepted

app = qdo.App("shop")
missing = qdo.Mesage  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def with_body(body: dict[str, Any], context: object) -> None: ...


def context_of_an_app(app: qdo.App) -> Iterator[int]:
    yield 1


# --- settings ---

qdo.App("a", atempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
qdo.App("a", attempts="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
qdo.Worker(app, brust=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
create_app(app.settings, anonymus=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
TestKit(app, fetch="7")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# --- options of jobs ---

app.job(accepted.take_any)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
app.job("a", timeout=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
app.job("a", order="keys")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
app.job("a", order="key", batch=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
app.job("a", "message", pool=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
app.job("a", pool=True, batch=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]

# --- functions of jobs ---

app.job()(accepted.seen)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.job()(accepted.failed)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.job()(accepted.failed_async)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.job()(accepted.invoice)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.job()(with_body)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.job(batch=5)(accepted.take)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.job(pool=True)(accepted.take_many)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]


def keep_signatures(message: qdo.Message[int]) -> None:
    message.body.upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    accepted.take_any(message)  # type: ignore[call-arg, unused-coroutine]  # pyright: ignore[reportCallIssue]


# --- hooks ---

app.context(context_of_an_app)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.middleware(accepted.take)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.middleware(jobs="async")(accepted.around)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.failure(accepted.seen)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.observer(accepted.take)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]

# --- calls ---

app.send("a", 1, delay_second=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
app.request("a", 1, dleay_seconds=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
app.request_many([("a", 1)])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
app.handle("7").result(timeout=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def wait(handle: qdo.Handle) -> None:
    await app.asend("a", 1, delay=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await app.arequest("a", 1, keep=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await handle.acancel(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
