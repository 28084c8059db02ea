"""Giving messages of SQS back, so that whoever asks next has them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gevent

from qdo.brokers.sqs_holding import Held, Holding
from qdo.brokers.sqs_pauses import TROUBLE
from qdo.brokers.sqs_requests import BATCH, Requests
from qdo.policy import backoff

TRIES = 4
"""How often it is tried to give messages back; they are seen again after a while anyway."""


class Releases:
    """Gives back messages of one queue.

    :param begin: runs something beside everything else.
    """

    def __init__(
        self,
        queue: str,
        requests: Requests,
        holding: Holding,
        begin: Callable[[Callable[[], None]], None],
        chance: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._requests = requests
        self._holding = holding
        self._begin = begin
        self._chance = chance

    def give_back(self, held: Sequence[Held]) -> None:
        """Let SQS show messages again; returns at once.

        Of a message group none is given out while another one is hidden, so that the order in
        which they become visible is of no consequence.
        """
        for each in held:
            self._holding.given_back(each)
        for start in range(0, len(held), BATCH):
            batch = held[start : start + BATCH]
            self._begin(lambda batch=batch: self._release(batch))  # type: ignore[misc]

    def _release(self, batch: Sequence[Held]) -> None:
        """Give messages back, also when SQS is in trouble for a moment: they wait otherwise."""
        for failures in range(1, TRIES + 1):
            batch = self._requests.release(self._queue, batch).failed
            if not batch:
                return
            gevent.sleep(backoff(failures, TROUBLE, self._chance()))
