"""The app of the demonstration: its job notes what it did in a ledger.

Run by `qdo demo` as ``qdo-worker qdo.demo.job:app``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import qdo
from qdo.demo.ledger import Ledger

COST_SECONDS = 0.05
"""What a message costs: as long as a call of some other service takes."""
LEDGER_FOLDER = "ledger"
"""Beside the file with the messages."""

app = qdo.App("demo")


@app.context
def ledger() -> Iterator[Ledger]:
    """Open this process's own file of the ledger."""
    messages = Path(app.settings.broker.removeprefix("sqlite:"))
    with Ledger(messages.parent / LEDGER_FOLDER) as opened:
        yield opened


@app.job()
def note(message: qdo.Message, context: Ledger) -> None:
    """Work for a while, then note queue and number of the message."""
    started = time.monotonic()
    time.sleep(COST_SECONDS)  # under gevent other queues go on meanwhile
    context.note(message.queue, message.body["number"], message.fence, started)
