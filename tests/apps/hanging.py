"""Jobs on each executor, of which some messages hang until the file `go` exists."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import gevent

import qdo
from qdo import Message

app = qdo.App("desk", session_timeout_seconds=5)


def wait(message: Message, sleep: Callable[[float], None]) -> None:
    while message.body == "hang" and not os.path.exists("go"):
        sleep(0.05)


@app.job("greenlet*")
def in_greenlet(message: Message, context: object) -> None:
    wait(message, gevent.sleep)


@app.job("lanes", order="none", concurrency=5)
def in_lanes(message: Message, context: object) -> None:
    wait(message, gevent.sleep)


@app.job("thread", executor="thread")
def in_thread(message: Message, context: object) -> None:
    wait(message, time.sleep)


@app.job("process", executor="process")
def in_process(message: Message, context: object) -> None:
    wait(message, time.sleep)


@app.job("async")
async def in_asyncio(message: Message, context: object) -> None:
    while message.body == "hang" and not os.path.exists("go"):
        await asyncio.sleep(0.05)
