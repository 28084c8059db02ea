"""Deletes of done messages of one queue of SQS: ten at a time, and none left behind for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gevent

from qdo.brokers.sqs_holding import Held, Holding
from qdo.brokers.sqs_pauses import TROUBLE
from qdo.brokers.sqs_requests import BATCH, Requests
from qdo.policy import backoff

LINGER_SECONDS = 0.5
"""A done message waits so long at most for others to be deleted with it."""


class Deletes:
    """What is done and not deleted yet.

    :param begin: runs something beside everything else.
    """

    def __init__(
        self,
        queue: str,
        requests: Requests,
        holding: Holding,
        begin: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._requests = requests
        self._holding = holding
        self._begin = begin
        self._clock = clock
        self._chance = chance
        self._waiting: list[Held] = []
        self._timer: Any = None

    def add(self, held: Sequence[Held], at_once: bool = False) -> None:
        """Delete messages soon: ten at a time, or when no other is in hand, or after a while."""
        if not held:
            return
        self._waiting += held
        if len(self._waiting) >= BATCH or not len(self._holding) or at_once:
            self._begin(self.flush)
        elif self._timer is None:
            self._timer = gevent.spawn_later(LINGER_SECONDS, self._lingered)

    def _lingered(self) -> None:
        self._timer = None
        self._begin(self.flush)

    def flush(self) -> None:
        """Delete what is done; returns when that is settled."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.kill(block=False)
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            self._delete(batch)

    def _delete(self, batch: list[Held]) -> None:
        failures = 0
        while batch:
            answer = self._requests.delete(self._queue, batch)
            for held in answer.done:
                self._holding.confirmed(held)
            for held in answer.refused:
                # Another receipt is valid now; with that it comes again, and is recognised.
                self._holding.undeletable(held)
            batch = list(answer.failed)
            if not batch:
                return
            failures += 1
            now = self._clock()
            for held in [each for each in batch if each.until <= now]:
                batch.remove(held)
                self._holding.undeletable(held)
            gevent.sleep(backoff(failures, TROUBLE, self._chance()) if batch else 0)
