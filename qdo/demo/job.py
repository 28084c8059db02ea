"""The app of the demo. Its job records each message in a ledger.

Run by `qdo demo` as ``qdo-worker qdo.demo.job:app``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import qdo
from qdo.demo.ledger import Ledger

COST_SECONDS = 0.05
"""Duration of a message: about as long as a call of another service."""
LEDGER_FOLDER = "ledger"
"""Folder beside the file with the messages."""

app = qdo.App("demo")


@app.context
def ledger() -> Iterator[Ledger]:
    """Open the ledger file of this process."""
    messages = Path(app.settings.broker.removeprefix("sqlite:"))
    with Ledger(messages.parent / LEDGER_FOLDER) as opened:
        yield opened


@app.job()
def note(message: qdo.Message, context: Ledger) -> None:
    """Work for a while, then record the queue and number of the message."""
    started = time.monotonic()
    time.sleep(COST_SECONDS)  # gevent runs other queues during the sleep
    context.note(message.queue, message.body["number"], message.fence, started)
