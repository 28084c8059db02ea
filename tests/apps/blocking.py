"""Jobs that block the event loop in several ways."""

from __future__ import annotations

import os
import re
import time

import gevent.monkey

import qdo
from qdo import Message

app = qdo.App("blocked", session_timeout_seconds=2, checkpoint_seconds=0.05)
out = open("out", "a", 1)  # noqa: SIM115
policy = qdo.Policy(attempts=2, backoff_seconds=0.02, backoff_max_seconds=0.1)

block = gevent.monkey.get_original("time", "sleep")  # as C code that waits does


def spin(seconds: float) -> None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        pass


@app.job(policy=policy)
@app.job("limited", policy=policy, timeout_seconds=1)
def job(message: Message, context: object) -> None:
    out.write(f"{message.queue} {message.body} {message.attempt} {os.getpid()}\n")
    if message.body == "wait":
        time.sleep(3600)
    if message.body == "long":
        spin(3)
    while message.body == "held" and not os.path.exists("go"):
        block(0.01)
    if message.body == "often":
        block(0.9)
    if message.body == "endless":
        block(3600)
    if message.body == "lock":
        re.match("(a+)+$", 60 * "a" + "b")
    while message.body == "freeze" and not os.path.exists(f"thawed-{os.getpid()}"):
        block(0.01)
    out.write(f"{message.queue} {message.body}-end {message.attempt} {os.getpid()}\n")
