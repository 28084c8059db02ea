"""The duty "retention": trims processed messages from the broker once they are old enough.

Each owner trims its own queues: only the owner knows the position up to which they are processed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import gevent

from qdo.brokers.ahead import check_reached
from qdo.brokers.base import Broker
from qdo.text import describe
from qdo.worker.duties.runner import Duty
from qdo.worker.engine.slot import Slot

_log = logging.getLogger(__name__)

PERIOD_SHARE = 0.05
"""A queue is trimmed this often, as a share of the retention time, within the limits below."""
PERIOD_MIN_SECONDS = 10.0
PERIOD_MAX_SECONDS = 3600.0


class Retention(Duty):
    """Deletes processed messages older than the retention time, one queue at a time.

    :param slots: the queues of this worker by name, as the dispatcher keeps them.
    """

    name = "retention"

    def __init__(
        self,
        broker: Broker,
        slots: Mapping[str, Slot],
        retention_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._broker = broker
        self._slots = slots
        self._retention_seconds = retention_seconds
        self._period = min(
            max(retention_seconds * PERIOD_SHARE, PERIOD_MIN_SECONDS), PERIOD_MAX_SECONDS
        )
        self._clock = clock
        self._round: list[str] = []
        self._round_ends = clock() + self._period

    def run(self) -> None:
        while True:
            gevent.sleep(self.step())

    def step(self) -> float:
        """Trim the next owned queue; return the seconds until the next step.

        A round through all owned queues takes one period. This spreads out the deletes of
        thousands of queues.
        """
        now = self._clock()
        if not self._round:
            if now < self._round_ends:
                return self._round_ends - now
            self._round = sorted(self._slots)
            self._round_ends = now + self._period
        if self._round:
            self._trim(self._slots.get(self._round.pop()))
        return max(0.0, self._round_ends - now) / (len(self._round) + 1)

    def _trim(self, slot: Slot | None) -> None:
        claim = slot.claim if slot is not None else None
        if claim is None or not claim.open or not claim.done:
            return
        try:
            check_reached(self._broker, claim.queue, claim.done)
            count = self._broker.trim(claim.queue, claim.done, self._retention_seconds)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "queue %s: cannot delete old messages, retrying in the next round: %s",
                claim.queue,
                describe(error),
            )
            return
        if count:
            _log.info("queue %s: deleted %d old messages", claim.queue, count)
