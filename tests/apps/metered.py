"""Jobs that end in every way, for the metrics."""

from __future__ import annotations

import contextlib
import os
import time

import qdo
from qdo import Message

app = qdo.App("desk", history="")
if os.path.exists("broken"):
    os._exit(1)


@app.job("plain-*")
def plain(message: Message, context: object) -> None:
    pass


@app.job("keyed-*", order="key", concurrency=10)
def keyed(message: Message, context: object) -> None:
    time.sleep(0.001)


@app.job("batch-*", batch=10)
def batched(messages: list[Message], context: object) -> None:
    pass


@app.job("thread-*", executor="thread")
def threaded(message: Message, context: object) -> None:
    pass


@app.job("failing-*", policy=qdo.Policy(attempts=2, backoff_seconds=0.01))
def failing(message: Message, context: object) -> None:
    if message.body == "skip":
        raise qdo.Skip("not needed")
    if message.body == "wait":
        with contextlib.suppress(FileExistsError):
            open("waited", "x").close()  # one of two processes
            raise qdo.Retry(after=0.01, counts=False)
    if message.body == "fail":
        raise ValueError


@app.job("blocked-*", policy=qdo.Policy(attempts=1, then="block"))
def blocking(message: Message, context: object) -> None:
    raise ValueError


@app.job("waiting-*")
def waiting(message: Message, context: object) -> None:
    while not os.path.exists("go-on"):
        time.sleep(0.01)


@app.job("busy-*")
def busy(message: Message, context: object) -> None:
    end = time.perf_counter() + message.body
    while time.perf_counter() < end:
        pass
