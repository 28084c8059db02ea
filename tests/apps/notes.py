"""A job that writes down its runs: lines of queue, body, attempt and pid in the file `out`.

Files in its folder hold it, or let it fail. A worker gives it queues and options:
`tests.support.app_runs.AppRuns.work`.
"""

from __future__ import annotations

import os
from pathlib import Path

import gevent

from qdo import App, Message

app = App("desk")


def note(message: Message) -> None:
    with open("out", "a") as out:
        out.write(f"{message.queue} {message.body} {message.attempt} {os.getpid()}\n")


def job(messages: Message | list[Message], context: object) -> None:
    for message in messages if isinstance(messages, list) else [messages]:
        note(message)
        while Path(f"hold-{message.body}").exists():
            try:
                gevent.sleep(0.005)
            except BaseException:
                if not Path("stubborn").exists():
                    raise
        if Path(f"fail-{message.body}").exists():
            raise ValueError("no")
