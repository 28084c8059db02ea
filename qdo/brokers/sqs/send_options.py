"""The delays and deduplication that SQS supports."""

from __future__ import annotations

import math
import time

from qdo.brokers.base import DEDUP_SECONDS, NO_DEDUP, NO_DELAY, SendOptions
from qdo.brokers.sqs.url import FIFO
from qdo.errors import UnsupportedError

MAX_DELAY_SECONDS = 900
"""The longest delay that SQS supports."""


def check_options(queue: str, terms: SendOptions) -> None:
    """Raise for delays and deduplication that SQS does not support.

    :raises UnsupportedError: with the remedy.
    """
    fifo = queue.endswith(FIFO)
    if terms.due is not None and fifo:
        raise _unsupported("delay single messages of a FIFO queue", NO_DELAY)
    if terms.due is not None and terms.due - time.time() > MAX_DELAY_SECONDS:
        raise _unsupported(f"delay a message by more than {MAX_DELAY_SECONDS} s", "send it later")
    if terms.dedup_key is not None and not fifo:
        raise _unsupported(
            "deduplicate messages of a standard queue", f"{NO_DEDUP}, or to a FIFO queue"
        )
    if terms.dedup_key is not None and terms.dedup_seconds != DEDUP_SECONDS:
        raise _unsupported(
            f"deduplicate for {terms.dedup_seconds:g} s",
            f"leave dedup_seconds (--dedup-seconds) out: it is always {DEDUP_SECONDS:g} s",
        )


def _unsupported(what: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(broker="SQS", what=what, remedy=remedy)


def delay_seconds(due: float) -> int:
    """Return the seconds until a Unix time, rounded up: never too early."""
    return min(max(math.ceil(due - time.time()), 0), MAX_DELAY_SECONDS)
