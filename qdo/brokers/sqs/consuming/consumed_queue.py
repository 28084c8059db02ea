"""The record that the requests about one queue's held messages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gevent

from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.consuming.in_flight import InFlightMessages
from qdo.brokers.sqs.consuming.poll_backoff import RETRY_BACKOFF, Timing


@dataclass(frozen=True, slots=True)
class ConsumedQueue:
    """A queue with its held messages.

    :ivar begin: runs a task in a greenlet of its own.
    """

    name: str
    requests: SqsApi
    holding: InFlightMessages
    begin: Callable[[Callable[[], None]], None]
    timing: Timing

    def pause(self, failures: int) -> None:
        """Wait before the next attempt of a failed request."""
        gevent.sleep(RETRY_BACKOFF.delay(failures, self.timing.jitter()))
