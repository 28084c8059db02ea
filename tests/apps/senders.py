"""Jobs on each executor that send with a key against duplicates."""

from __future__ import annotations

import qdo
from qdo import Message

app = qdo.App("a")


@app.job("greenlet")
def from_a_greenlet(message: Message, context: object) -> None:
    app.send("seen", ["greenlet", message.body], dedup_key=f"greenlet {message.body}")


@app.job("thread", executor="thread")
def from_a_thread(message: Message, context: object) -> None:
    app.send("seen", ["thread", message.body], dedup_key=f"thread {message.body}")


@app.job("async")
async def from_a_coroutine(message: Message, context: object) -> None:
    await app.asend("seen", ["async", message.body], dedup_key=f"async {message.body}")


@app.job("process", executor="process")
def from_a_process(message: Message, context: object) -> None:
    app.send("seen", ["process", message.body], dedup_key=f"process {message.body}")
