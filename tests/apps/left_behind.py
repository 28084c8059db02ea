"""Jobs that leave tasks and greenlets behind which end their loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import gevent

import qdo
from qdo import Message
from tests.apps.notes import note

app = qdo.App("desk", attempts=2)


async def leave() -> None:
    sys.exit(3)


async def interrupt() -> None:
    raise KeyboardInterrupt


EXITS: dict[str, Callable[[asyncio.AbstractEventLoop], object]] = {
    "task": lambda loop: loop.create_task(leave()),
    "interrupt": lambda loop: loop.create_task(interrupt()),
    "callback": lambda loop: loop.call_soon(sys.exit, 3),
    "stop": lambda loop: loop.stop(),
}


@app.job("async-*")
async def on_loop(message: Message, context: object) -> None:
    left = EXITS[message.queue[6:]](asyncio.get_running_loop())  # noqa: F841 (keeps the task)
    await asyncio.sleep(0.05)
    note(message)


@app.job("thread", executor="thread")
def in_thread(message: Message, context: object) -> None:
    gevent.spawn(sys.exit, 3)
    gevent.sleep(0.05)
    note(message)


@app.job("*")
def in_greenlet(message: Message, context: object) -> None:
    gevent.spawn(sys.exit, 3)
    gevent.sleep(0.05)
    note(message)
