"""How a worker finds that it lacks a processor."""

from __future__ import annotations

import pytest

from qdo.coordination.znodes.worker_report import STARVED_SECONDS
from qdo.worker.duties.status_report import ProcessorWaits

EVERY = STARVED_SECONDS / 3


def shares(*waits: float) -> list[float | None]:
    """Look after every third of the time, with the seconds waited since the last look."""
    watch = ProcessorWaits()
    found = []
    total = 0.0
    for number, seconds in enumerate(waits):
        total += seconds
        found.append(watch.look(number * EVERY, total, 0.0))
    return found


def test_a_worker_is_starved_only_after_the_whole_time() -> None:
    """What it waited before the first look does not count."""
    assert shares(500.0, EVERY, EVERY, EVERY) == [None, None, None, 1.0]


def test_only_the_last_seconds_count() -> None:
    starved = shares(0.0, EVERY, EVERY, EVERY, 0.0, 0.0, 0.0, EVERY, EVERY, EVERY)
    assert starved == [None, None, None, 1.0, 0.67, 0.33, None, 0.33, 0.67, 1.0]


def test_rare_looks_count_the_time_between_them() -> None:
    """As of a worker that hardly runs."""
    watch = ProcessorWaits()
    assert watch.look(0.0, 0.0, 0.0) is None
    assert watch.look(100.0, 95.0, 1.0) == 0.95
    assert watch.look(200.0, 95.0, 2.0) is None


@pytest.mark.parametrize(
    ("waited", "ran", "starved"),
    [
        (18.0, 0.3, True),  # a hundredth of a processor, little to do
        (29.0, 0.4, True),  # the same, much to do
        (26.0, 4.0, True),  # six busy processes beside it
        (22.5, 7.5, False),  # three
        (2.1, 0.3, False),  # little to do on a machine that is busy
        (0.1, 29.0, False),
    ],
)
def test_who_is_starved(waited: float, ran: float, starved: bool) -> None:
    """A worker that has what it wants is not, and one that is busy shares with others."""
    watch = ProcessorWaits()
    watch.look(0.0, 0.0, 0.0)
    assert (watch.look(STARVED_SECONDS, waited, ran) is not None) == starved
