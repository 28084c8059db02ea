"""Jobs on each executor that run until the file `go` exists."""

from __future__ import annotations

import asyncio
import os
import time

import gevent

import qdo
from qdo import Message

app = qdo.App("desk", session_timeout_seconds=5)


def until_released() -> None:
    while not os.path.exists("go"):
        gevent.sleep(0.01)


def until_released_in_a_thread() -> None:
    while not os.path.exists("go"):
        time.sleep(0.01)


@app.job("greenlet")
def in_greenlet(message: Message, context: object) -> None:
    until_released()


@app.job("lanes-*", order="none", concurrency=5)
def in_lanes(message: Message, context: object) -> None:
    until_released()


@app.job("thread", executor="thread")
def in_thread(message: Message, context: object) -> None:
    until_released_in_a_thread()


@app.job("process", executor="process")
def in_process(message: Message, context: object) -> None:
    until_released_in_a_thread()


@app.job("async")
async def in_asyncio(message: Message, context: object) -> None:
    while not os.path.exists("go"):
        await asyncio.sleep(0.01)


@app.job("busy")
def busy(message: Message, context: object) -> None:
    while not os.path.exists("go"):
        pass
