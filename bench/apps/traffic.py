"""The app of the workers in `bench.support.fleet`: every job records its start time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import qdo

APP = "bench"
FOLDER = "BENCH_JOURNALS"

app = qdo.App(APP)


@app.context
def journal() -> Iterator[TextIO]:
    """Yield this worker's journal; a line is written completely before its job returns."""
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}-{time.monotonic_ns()}.txt"
    with path.open("w", buffering=1) as file:
        yield file


@app.job()
def job(message: qdo.Message, context: Any) -> None:
    """Write queue, number, time sent and time started."""
    body = message.body
    context.write(f"{message.queue} {body['number']} {body['sent']} {time.monotonic_ns()}\n")
