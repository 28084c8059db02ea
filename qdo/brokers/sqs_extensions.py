"""Having SQS hide messages for longer while they are in hand: a duty of its own for each queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gevent

from qdo.brokers.sqs_holding import Held, Holding
from qdo.brokers.sqs_requests import BATCH, Requests
from qdo.policy import Policy, backoff

TROUBLE = Policy(backoff_seconds=0.2, backoff_max_seconds=2.0)
"""Pauses after extensions that failed: short ones, for time is running out."""


class Extensions:
    """Those of what one owner holds of a queue.

    :param begin: runs something beside everything else.
    :param choose: returns which of those that are due are to be held on.
    :param lose: told what may be somebody else's by now.
    """

    def __init__(
        self,
        queue: str,
        requests: Requests,
        holding: Holding,
        begin: Callable[[Callable[[], None]], None],
        *,
        choose: Callable[[Sequence[Held]], Sequence[Held]],
        lose: Callable[[Sequence[Held]], None],
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._requests = requests
        self._holding = holding
        self._begin = begin
        self._choose = choose
        self._lose = lose
        self._clock = clock
        self._chance = chance
        self._timer: Any = None
        self._under_way = False
        self._failures = 0
        self._stopped = False

    def schedule(self) -> None:
        """See to it that what is held is extended in time; to be called when something came."""
        if self._timer is not None or self._under_way or self._stopped:
            return
        due = self._holding.extend_at()
        if due != float("inf"):
            pause = max(0.0, due - self._clock())
            if self._failures:
                pause = max(pause, backoff(self._failures, TROUBLE, self._chance()))
            self._timer = gevent.spawn_later(pause, self._due)

    def stop(self) -> None:
        """Extend nothing any more."""
        self._stopped = True
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.kill(block=False)

    def _due(self) -> None:
        self._timer = None
        self._begin(self._extend)

    def _extend(self) -> None:
        self._under_way = True
        failed = True
        try:
            failed = not self._extend_all()
        finally:
            self._under_way = False
            self._failures = self._failures + 1 if failed else 0
            self.schedule()

    def _extend_all(self) -> bool:
        """Ask once for each ten that are due; return whether every one has its answer."""
        due, over = self._holding.to_extend(self._clock())
        self._lose(over)
        chosen = self._choose(due)
        answered = True
        for start in range(0, len(chosen), BATCH):
            batch = [
                held
                for held in chosen[start : start + BATCH]
                if self._holding.is_held(held.position)
            ]
            if batch and not self._stopped:
                answered &= self._extend_batch(batch)
        return answered

    def _extend_batch(self, batch: list[Held]) -> bool:
        """Ask once; return whether every entry has its answer."""
        asked_at = self._clock()
        receipts = [held.receipt for held in batch]
        answer = self._requests.extend(self._queue, batch)
        for held in answer.done:
            self._holding.extended(held, asked_at)
        # One that was received again meanwhile is ours by another receipt.
        asked = dict(zip(map(id, batch), receipts, strict=True))
        self._lose([held for held in answer.refused if asked[id(held)] == held.receipt])
        return not answer.failed
