"""Jobs with limits, which count in a database how many of them run at once."""

from __future__ import annotations

import os
import sqlite3
import time

import qdo
from qdo import Message

app = qdo.App("desk")


def audit(queue: str, seconds: float, limit: str = "crm") -> None:
    # BEGIN IMMEDIATE: the sum of all processes is read and written at once.
    db = sqlite3.connect("audit.db", timeout=30, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO busy VALUES (?, ?, ?)", (queue, os.getpid(), limit))
    rows = db.execute("SELECT pid FROM busy WHERE name = ?", (limit,)).fetchall()
    now = sum(os.path.exists(f"/proc/{pid}") for (pid,) in rows)
    db.execute("INSERT INTO seen VALUES (?, ?, ?, ?)", (limit, now, os.getpid(), time.time()))
    db.execute("COMMIT")
    time.sleep(seconds)
    db.execute("DELETE FROM busy WHERE queue = ?", (queue,))
    db.close()


@app.job("thread-*", executor="thread", limits=["crm"])
def in_thread(message: Message, context: object) -> None:
    audit(message.queue, 0.02)


@app.job("greenlet-*", limits=["crm"])
def in_greenlet(message: Message, context: object) -> None:
    audit(message.queue, 0.0)


@app.job("process-*", executor="process", limits=["crm"])
def in_process(message: Message, context: object) -> None:
    audit(message.queue, 0.01)


@app.job("aio-*", limits=["crm"])
async def on_loop(message: Message, context: object) -> None:
    audit(message.queue, 0.0)


@app.job("keyed-*", order="key", executor="thread", limits=["crm"])
def keyed(message: Message, context: object) -> None:
    audit(f"{message.queue}-{message.key}", 0.01)


@app.job("batch-*", batch=5, limits=["crm"])
def batches(messages: list[Message], context: object) -> None:
    for message in messages:
        audit(message.queue, 0.0)


@app.job("rated-*", limits=["api"])
def rated(message: Message, context: object) -> None:
    audit(message.queue, 0.0, "api")


@app.job("own-*", per_queue_rate="20/s")
def own(message: Message, context: object) -> None:
    audit(message.queue, 0.0, message.queue)


@app.job("keyedown-*", order="key", concurrency=8, per_queue_rate="20/s")
def keyed_own(message: Message, context: object) -> None:
    audit(message.queue, 0.0, message.queue)


@app.job("inner-*", executor="thread")
def inner(message: Message, context: object) -> None:
    with app.limit("crm", timeout_seconds=60):
        audit(message.queue, 0.01)


@app.job("both-*", executor="thread", limits=["gpu", "crm"])
def both(message: Message, context: object) -> None:
    audit(message.queue, 0.01)


@app.job("none-*", limits=["missing"])
def without(message: Message, context: object) -> None:
    audit(message.queue, 0.0, "missing")


@app.job("place-*", executor="thread")
def place(message: Message, context: object) -> None:
    while not os.path.exists("go"):
        time.sleep(0.01)


@app.job("rest-*", batch=100, batch_wait_seconds=600)
def rest(messages: list[Message], context: object) -> None:
    pass
