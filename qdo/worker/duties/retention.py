"""The duty "retention" deletes old processed messages and old dead letters.

Each owner trims its own queues, because only the owner knows their processed positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from gevent.event import Event

from qdo.brokers.base import Broker, check_reached
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.text import describe, pluralize
from qdo.worker.duties.duty import Duty
from qdo.worker.engine.slot import Slot

_log = logging.getLogger(__name__)

# Time between trims of a queue, as a share of the retention time, and its limits in seconds.
PERIOD_SHARE = 0.05
PERIOD_MIN_SECONDS = 10.0
PERIOD_MAX_SECONDS = 3600.0
# Maximum seconds between trims of a queue if the settings limit dead letters.
DEAD_LETTERS_SECONDS = 60.0


class Retention(Duty):
    """Deletes processed messages and dead letters beyond their limits, one queue at a time."""

    name = "retention"

    def __init__(
        self,
        broker: Broker,
        slots: Mapping[str, Slot],
        settings: SettingsInForce,
        clock: Callable[[], float],
    ) -> None:
        self._broker = broker
        self._slots = slots
        self._settings = settings
        self._clock = clock
        self._round: list[str] = []
        self._round_ends = clock() + self._period()
        self._changed = Event()
        settings.on_change(lambda changed: self._changed.set())

    def run(self) -> None:
        while True:
            if self._changed.wait(self.step()):
                self._changed.clear()
                # The changed settings may require an earlier start of the next round.
                self._round_ends = min(self._round_ends, self._clock() + self._period())

    def step(self) -> float:
        """Trim the next queue of the round; return the seconds until the next step."""
        # A round takes one period, to spread out the deletes of thousands of queues.
        now = self._clock()
        if not self._round:
            if now < self._round_ends:
                return self._round_ends - now
            self._round = sorted(self._slots)
            self._round_ends = now + self._period()
        if self._round:
            self._trim(self._slots.get(self._round.pop()))
        return max(0.0, self._round_ends - now) / (len(self._round) + 1)

    def _period(self) -> float:
        settings = self._settings.now
        longest = DEAD_LETTERS_SECONDS if _limits_letters(settings) else PERIOD_MAX_SECONDS
        return min(max(settings.retention_seconds * PERIOD_SHARE, PERIOD_MIN_SECONDS), longest)

    def _trim(self, slot: Slot | None) -> None:
        claim = slot.claim if slot is not None else None
        if slot is None or claim is None or not claim.open or slot.is_pool:
            return
        try:
            if _limits_letters(self._settings.now):
                self._prune(claim.queue)
            if not claim.done:
                return
            check_reached(self._broker, claim.queue, claim.done)
            seconds = self._settings.now.retention_seconds
            count = self._broker.trim(claim.queue, claim.done, seconds)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "queue %s: cannot delete old messages, retrying in the next round: %s",
                claim.queue,
                describe(error),
            )
            return
        if count:
            _log.info("queue %s: deleted %d old messages", claim.queue, count)

    def _prune(self, queue: str) -> None:
        settings = self._settings.now
        letters = self._broker.dead_letters
        if limit := settings.dead_letter_limit:
            count = letters.prune(queue, keep=limit)
            if count:
                _log.warning(
                    "queue %s: deleted its oldest %s, because it keeps %d (dead_letter_limit)",
                    queue,
                    pluralize(count, "dead letter"),
                    limit,
                )
        if seconds := settings.dead_letter_retention_seconds:
            count = letters.prune(queue, before=time.time() - seconds)
            if count:
                _log.warning(
                    "queue %s: deleted %s older than %g s (dead_letter_retention_seconds)",
                    queue,
                    pluralize(count, "dead letter"),
                    seconds,
                )


def _limits_letters(settings: Settings) -> bool:
    return bool(settings.dead_letter_limit or settings.dead_letter_retention_seconds)
