"""The counts of the last hour in the report of a worker."""

from __future__ import annotations

import json
from dataclasses import asdict

from qdo.coordination.znodes.worker_report import MINUTES, LastHour
from qdo.worker.duties.status_report import MinuteCounts
from qdo.worker.engine.slot import Counters

NOON = 29_402_880 * 60.0


def test_counts_are_those_of_their_minutes() -> None:
    """The newest minute first, and skipped messages are neither done nor failed."""
    counters = Counters()
    minutes = MinuteCounts(counters)
    assert minutes.look(NOON) == LastHour(29_402_880)
    counters.attempts, counters.unsuccessful, counters.skipped = 10, 4, 1
    counters.dead_lettered = 2
    assert minutes.look(NOON + 59) == LastHour(29_402_880, (6,), (3,), (2,))
    counters.attempts = 12
    assert minutes.look(NOON + 130) == LastHour(29_402_882, (2, 0, 6), (0, 0, 3), (0, 0, 2))
    assert minutes.look(NOON + 60 * MINUTES) == LastHour(29_402_940, (*(0,) * 58, 2))
    assert minutes.look(NOON + 60 * 1000) == LastHour(29_403_880)


def test_an_attempt_that_is_taken_back_counts_once() -> None:
    """A total may shrink for a while."""
    counters = Counters(attempts=5)
    minutes = MinuteCounts(counters)
    minutes.look(NOON)
    counters.attempts = 4
    minutes.look(NOON)
    counters.attempts = 6
    assert minutes.look(NOON).done == (6,)


def test_a_clock_that_is_set_back_keeps_a_bounded_hour() -> None:
    counters = Counters()
    minutes = MinuteCounts(counters)
    for number in range(300):
        counters.attempts += 100
        found = minutes.look(NOON + number * (60 if number % 2 else -60))
        assert max(map(len, (found.done, found.failed, found.dead_lettered))) <= MINUTES
    assert len(json.dumps(asdict(found))) < 500
