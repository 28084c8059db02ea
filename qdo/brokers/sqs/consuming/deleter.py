"""Deleting the done messages of one SQS queue: ten at a time, and none waits long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gevent

from qdo.brokers.sqs.consuming.consumed_queue import ConsumedQueue
from qdo.brokers.sqs.consuming.in_flight_message import InFlightMessage
from qdo.brokers.sqs.url import BATCH

LINGER_SECONDS = 0.5
"""How long a done message waits at most for others to be deleted with it."""


class Deleter:
    """Deletes done messages."""

    def __init__(self, queue: ConsumedQueue) -> None:
        self._queue = queue
        self._holding = queue.holding
        self._waiting: list[InFlightMessage] = []
        self._timer: Any = None

    def add(self, held: Sequence[InFlightMessage], at_once: bool = False) -> None:
        """Delete messages soon: ten at a time, or when no other is held, or after a while."""
        if not held:
            return
        self._waiting += held
        if len(self._waiting) >= BATCH or not len(self._holding) or at_once:
            self._queue.begin(self.flush)
        elif self._timer is None:
            self._timer = gevent.spawn_later(LINGER_SECONDS, self._lingered)

    def _lingered(self) -> None:
        self._timer = None
        self._queue.begin(self.flush)

    def flush(self) -> None:
        """Delete all done messages; returns when each is deleted or undeletable."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.kill(block=False)
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            self._delete(batch)

    def _delete(self, batch: list[InFlightMessage]) -> None:
        failures = 0
        while batch:
            answer = self._queue.requests.delete(self._queue.name, batch)
            for held in answer.done:
                self._holding.confirmed(held)
            for held in answer.refused:
                # A newer receipt is valid; SQS delivers the message again, and it is recognized.
                self._holding.undeletable(held)
            batch = list(answer.failed)
            if not batch:
                return
            failures += 1
            now = self._queue.timing.clock()
            for held in [each for each in batch if each.until <= now]:
                batch.remove(held)
                self._holding.undeletable(held)
            if batch:
                self._queue.pause(failures)
