"""Jobs that change the folder of their process."""

from __future__ import annotations

import os

import qdo
from qdo import Message

app = qdo.App("moving")


def say(message: Message) -> None:
    with open(os.environ["SAID"], "a") as file:
        file.write(f"{message.queue} {message.body}\n")


@app.job("moves")
def moves(message: Message, context: object) -> None:
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    app.send("process", message.body)
    app.send("thread", message.body)
    say(message)


@app.job("thread", executor="thread")
def in_thread(message: Message, context: object) -> None:
    say(message)


@app.job("process", executor="process")
def in_process(message: Message, context: object) -> None:
    say(message)
