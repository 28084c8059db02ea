"""The app of qdo's worker in comparisons; see `bench.peers.common`."""

from __future__ import annotations

from typing import Any

import qdo
from bench.peers import common as tally

APP = "bench"

app = qdo.App(APP)
run = tally.from_environment()


@app.job()
def job(message: qdo.Message, context: Any) -> None:
    """Run the compared job."""
    run(message.body)
