"""The app that qdo's own worker runs in comparisons; see `bench.peers.tally`."""

from __future__ import annotations

from typing import Any

import qdo
from bench.peers import tally

APP = "bench"

app = qdo.App(APP)
run = tally.from_environment()


@app.job()
def job(message: qdo.Message, context: Any) -> None:
    """Run the compared job."""
    run(message.body)
