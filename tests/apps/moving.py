"""Jobs that write down their runs; those of the queue `slow` wait for the file `go`."""

from __future__ import annotations

import os

import gevent

import qdo
from qdo import Message
from tests.apps.notes import note

app = qdo.App("desk")


@app.job("slow")
def slow(message: Message, context: object) -> None:
    while not os.path.exists("go"):
        gevent.sleep(0.01)
    note(message)


@app.job("*")
def job(message: Message, context: object) -> None:
    note(message)
