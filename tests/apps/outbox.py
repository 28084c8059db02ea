"""An app with an outbox, whose relay is killed at a step."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import qdo
from qdo import Message
from qdo.outbox import Outbox

app = qdo.App("shop")
engine = create_engine("sqlite:///app.db", connect_args={"timeout": 30})
outbox = Outbox(app, engine)
step = os.environ.get("TESTS_KILL_AT")


def dying(name: str) -> Callable[..., Any]:
    real = getattr(outbox, name)

    def once(*arguments: Any) -> Any:
        done = real(*arguments) if step == "after" else None
        if not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done if step == "after" else real(*arguments)

    return once


def telling(real: Callable[..., Any]) -> Callable[..., Any]:
    def tell(*arguments: Any) -> Any:
        pathlib.Path("reading").touch()
        return real(*arguments)

    return tell


if step == "told":
    vars(outbox)["_oldest"] = telling(outbox._oldest)
elif step in ("read", "after"):
    # Killed before or after it read, thus before sending.
    vars(outbox)["_oldest"] = dying("_oldest")
elif step == "delete":
    vars(outbox)["_delete"] = dying("_delete")  # killed after sending, before deleting


def put(*queues: str) -> None:
    with Session(engine) as session, session.begin():
        for queue in queues:
            outbox.send(session, queue, 0, key=None)


def fill(first: int, last: int) -> None:
    with Session(engine) as session, session.begin():
        outbox.create(session)
        for number in range(first, last):
            outbox.send(session, f"q{number % 3}", number)


@app.job()
def job(message: Message, context: object) -> None:
    with open("runs", "a") as runs:
        runs.write(f"{message.queue} {message.body} {message.id}\n")
