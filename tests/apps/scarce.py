"""Jobs in threads, and one that leaves its process few descriptors."""

from __future__ import annotations

import os
import resource

import gevent

import qdo
from qdo import Message
from tests.apps.notes import note

app = qdo.App("desk", attempts=2)


@app.job("thread-*", executor="thread")
def thread(message: Message, context: object) -> None:
    note(message)


@app.job("loop")
async def loop(message: Message, context: object) -> None:
    note(message)


@app.job("limit")
def limit(message: Message, context: object) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + message.body, before[1]))
    while not os.path.exists("enough"):
        gevent.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
