"""Jobs on each executor that send, each message once, and are killed between."""

from __future__ import annotations

import os
import pathlib
import signal

import qdo
from qdo import Message

app = qdo.App("shop", backoff_seconds=0.01, backoff_max_seconds=0.02)


def after(number: int, message: Message) -> None:
    if number == 7 and not os.path.exists(message.queue):
        pathlib.Path(message.queue).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 9 and message.attempt < 3:
        raise ValueError("once more")


@app.job("greenlet")
@app.job("thread", executor="thread")
@app.job("process", executor="process")
def dispatch(message: Message, context: object) -> None:
    for number in range(10):
        app.send(f"to-{number}", message.queue, once=message)
        after(number, message)


@app.job("async")
async def adispatch(message: Message, context: object) -> None:
    for number in range(10):
        await app.asend(f"to-{number}", message.queue, once=message)
        after(number, message)
