"""How a worker finds that it lacks a processor."""

from __future__ import annotations

from qdo.coordination.znodes.worker_report import STARVED_SECONDS
from qdo.worker.duties.status_report import STARVED_SHARE, ProcessorWaits

LOOKS = 4
EVERY = STARVED_SECONDS / 3


def shares(*waits: float) -> list[float | None]:
    """Look after every third of the time, with the seconds waited since the last look."""
    waited, found = ProcessorWaits(), []
    total = 0.0
    for number, seconds in enumerate(waits):
        total += seconds
        found.append(waited.look(number * EVERY, total))
    return found


def test_a_worker_is_starved_only_after_the_whole_time() -> None:
    """What it waited before the first look does not count."""
    assert shares(500.0, EVERY, EVERY, EVERY) == [None, None, None, 1.0]


def test_a_share_below_the_limit_is_not_reported() -> None:
    """A busy worker beside others is no starved one."""
    less = EVERY * (STARVED_SHARE - 0.05)
    assert shares(0.0, less, less, less) == [None] * LOOKS


def test_only_the_last_seconds_count() -> None:
    starved = shares(0.0, EVERY, EVERY, EVERY, 0.0, EVERY, EVERY, EVERY)
    assert starved == [None, None, None, 1.0, None, None, None, 1.0]


def test_rare_looks_count_the_time_between_them() -> None:
    """As of a worker that hardly runs."""
    waits = ProcessorWaits()
    assert waits.look(0.0, 0.0) is None
    assert waits.look(100.0, 95.0) == 0.95
    assert waits.look(200.0, 95.0) is None
