"""The apps of `bench.sqs`, for standard and for FIFO queues; see `bench.peers.common`."""

from __future__ import annotations

from typing import Any

import qdo
from bench.peers import common as tally

CONCURRENCY = 100

standard = qdo.App("bench")
fifo = qdo.App("bench")
run = tally.from_environment()


@standard.job(order="none", concurrency=CONCURRENCY)
def unordered(message: qdo.Message, context: Any) -> None:
    """Run the compared job; a standard queue is not ordered."""
    run(message.body)


@fifo.job(order="key", concurrency=CONCURRENCY)
def ordered(message: qdo.Message, context: Any) -> None:
    """Run the compared job, in order within a message group."""
    run(message.body)
