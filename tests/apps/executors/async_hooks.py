"""Async hooks, which write down the steps; the connection of the context belongs to its loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import qdo

app = qdo.App("desk", attempts=2, backoff_seconds=0.01)
loops: set[int] = set()


async def said(*words: object) -> None:
    loops.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    with open("said", "a") as file:
        print(*words, f"loops={len(loops)}", file=file)


@app.context
async def connection() -> AsyncIterator[dict[str, int]]:
    await said("enter")
    yield {"calls": 0}
    await said("leave")


@app.middleware
async def around(call_next: Callable[..., Awaitable[None]], message: Any, context: Any) -> None:
    await said("before", message.body)
    await call_next(message, context)


@app.job("q")
async def job(message: qdo.Message, context: dict[str, int]) -> None:
    context["calls"] += 1
    await said("job", message.body, context["calls"])
    if message.body == "fail":
        raise ValueError("no")


@app.failure
async def failed(message: qdo.Message, context: dict[str, int], error: BaseException) -> None:
    await said("failure", message.body, context["calls"], error)


@app.observer
async def observe(event: qdo.Event) -> None:
    await said("event", event.outcome)
    if event.outcome == "dead-letter":
        raise RuntimeError("an observer that fails ends nothing")
