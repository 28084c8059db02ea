"""Jobs on each executor with a context and middleware, which write down what they do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import qdo
from qdo import Message


def say(*words: object) -> None:
    with open("said", "a") as file:
        file.write(" ".join(map(str, (os.getpid(), *words))) + "\n")


@contextlib.contextmanager
def resources() -> Iterator[dict[str, bool]]:
    say("enter")
    yield {"open": True}
    say("leave")


app = qdo.App("test", job_context=resources)


def act(message: Message, context: dict[str, bool]) -> None:
    assert context["open"]
    say("job", message.queue, message.body)
    if message.body == "fail" and message.attempt == 1:
        raise ValueError("no")


app.job("greenlet")(act)
app.job("thread", executor="thread")(act)
app.job("process", executor="process")(act)


@app.job("asyncio")
async def coroutine(message: Message, context: dict[str, bool]) -> None:
    act(message, context)


@app.middleware(jobs="sync")
def around(call_next: Callable[..., Any], message: Message, context: Any) -> None:
    say("before", message.body)
    try:
        call_next(message, context)
    finally:
        say("after", message.body)


@app.middleware(jobs="async")
async def async_around(
    call_next: Callable[..., Awaitable[Any]], message: Message, context: Any
) -> None:
    say("before", message.body)
    try:
        await call_next(message, context)
    finally:
        say("after", message.body)
