"""Jobs on each executor that read a document."""

from __future__ import annotations

import qdo
from qdo import Message

app = qdo.App("desk")
plans = app.documents("plans")


def say(message: Message) -> None:
    with open("said", "a") as file:
        file.write(f"{message.queue} {message.body} {plans['acme']}\n")


@app.job("greenlet")
def plain(message: Message, context: object) -> None:
    say(message)


@app.job("thread", executor="thread")
def in_thread(message: Message, context: object) -> None:
    say(message)


@app.job("process", executor="process")
def in_process(message: Message, context: object) -> None:
    say(message)


@app.job("asyncio")
async def on_loop(message: Message, context: object) -> None:
    say(message)


@app.job("locked", executor="thread")
def locked(message: Message, context: object) -> None:
    with app.lock("one", timeout_seconds=10) as held:
        plans.put("holder", message.body)
        held.check()
        say(message)


@app.job("batch", batch=10)
def in_batches(messages: list[Message], context: object) -> None:
    for message in messages:
        say(message)
