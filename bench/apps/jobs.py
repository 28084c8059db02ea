"""The apps of `bench.jobs`: a keyed queue with jobs that wait, and no-op batches."""

from __future__ import annotations

import time
from typing import Any

import qdo
from bench.peers import common as tally

JOB_SECONDS = 0.010
KEYS = 100
BATCH = 500

keyed = qdo.App("bench")
batched = qdo.App("bench")
idle = qdo.App("bench")
run = tally.from_environment()


@keyed.job(order="key", concurrency=KEYS)
def wait(message: qdo.Message, context: Any) -> None:
    """Wait as for a service, then count."""
    time.sleep(JOB_SECONDS)
    run(message.body)


@batched.job(batch=BATCH)
def count(batch: qdo.Batch, context: Any) -> None:
    """Count each message, like the bare loop."""
    for message in batch:
        run(message.body)


@idle.job()
def nothing(message: qdo.Message, context: Any) -> None:
    """Count a message."""
    run(message.body)
