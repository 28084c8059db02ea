"""Jobs that work, wait, fail and hang, for `qdo status`."""

from __future__ import annotations

import threading
import time

import qdo
from qdo import Message

app = qdo.App("desk")
never = threading.Event()


@app.job("fine")
def fine(message: Message, context: object) -> None:
    pass


@app.job("slow")
def slow(message: Message, context: object) -> None:
    time.sleep(0.002)


@app.job("held-*")
def held(message: Message, context: object) -> None:
    pass


@app.job("poison", policy=qdo.Policy(attempts=1, then="block"))
def poison(message: Message, context: object) -> None:
    raise ValueError("no vase")


@app.job("flaky", policy=qdo.Policy(attempts=9, backoff_seconds=600, backoff_max_seconds=600))
def flaky(message: Message, context: object) -> None:
    raise LookupError("not yet")


@app.job("limited-*", limits=["crm"])
@app.job("hung")
def hung(message: Message, context: object) -> None:
    never.wait()
