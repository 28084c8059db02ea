"""The app of `bench.executors`: a no-op job in every executor."""

from __future__ import annotations

from typing import Any

import qdo

app = qdo.App("bench")


@app.job("greenlet")
def in_greenlet(message: qdo.Message, context: Any) -> None:
    """Do nothing, called by the turn directly."""


@app.job("timed", timeout_seconds=60)
def in_greenlet_with_deadline(message: qdo.Message, context: Any) -> None:
    """Do nothing, with a timer."""


@app.job("asyncio")
async def on_asyncio_loop(message: qdo.Message, context: Any) -> None:
    """Do nothing, on the asyncio loop."""


@app.job("thread", executor="thread")
def in_thread(message: qdo.Message, context: Any) -> None:
    """Do nothing, in a native thread."""


@app.job("process", executor="process")
def in_process(message: qdo.Message, context: Any) -> None:
    """Do nothing, in a child process."""
