"""What is counted of the turns of a queue."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from qdo.jobs.job import Job
from qdo.message import Batch, Message
from qdo.outcomes import FailedAt
from qdo.positions import position_of_time
from qdo.worker.engine.meters import MOST_GLOBS, OTHERS, JobMeter, JobMeters
from qdo.worker.executors.base import NotStarted

SENT = 1_700_000_000.0


@dataclass
class Times:
    """Clocks that a test sets."""

    clock: float = 100.0
    wall: float = SENT


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def meter(times: Times) -> JobMeter:
    return JobMeter(lambda: times.clock, lambda: times.wall)


def message(attempt: int = 1) -> Message:
    return Message("q", position_of_time(SENT), None, attempt=attempt)


def slot(last: Message | None = None, unreturned: int = 0, unstarted: int = 0) -> Any:
    return SimpleNamespace(message=last, unreturned=unreturned, unstarted=unstarted)


def classes(meter: JobMeter) -> dict[float, int]:
    """Return the counted durations by the upper bounds of their classes."""
    bounds = (*meter.durations.bounds, float("inf"))
    return {bound: n for bound, n in zip(bounds, meter.durations.counts, strict=True) if n}


def test_one_message_counts_exactly(meter: JobMeter, times: Times) -> None:
    times.clock += 3.0
    meter.turn(slot(), 1, 100.0, 100.02)
    assert (meter.done, classes(meter), meter.durations.seconds) == (1, {10.0: 1}, 3.0)


def test_messages_of_a_turn_count_with_their_mean(meter: JobMeter, times: Times) -> None:
    times.clock += 0.02
    meter.turn(slot(), 10, 100.0, 100.02)
    assert classes(meter) == {0.005: 10}
    assert meter.durations.seconds == pytest.approx(0.02)


def test_a_long_message_at_the_end_counts_alone(meter: JobMeter, times: Times) -> None:
    """It ran past the end of the turn: those before it were short."""
    times.clock += 5.02
    meter.turn(slot(), 1000, 100.0, 100.02)
    assert classes(meter) == {0.001: 999, 10.0: 1}
    assert meter.durations.seconds == pytest.approx(5.02)


def test_only_returned_messages_are_done(meter: JobMeter, times: Times) -> None:
    """An attempt that failed has a duration; a message that was not started has not."""
    times.clock += 0.01
    meter.turn(slot(unreturned=1, unstarted=1), 5, 100.0, 101.0)
    assert (meter.done, sum(meter.durations.counts)) == (3, 4)


def test_a_turn_without_messages_counts_nothing(meter: JobMeter) -> None:
    meter.turn(slot(message(), unstarted=1), 1, 100.0, 101.0)
    meter.turn(slot(message()), 0, 100.0, 101.0)
    assert sum(meter.durations.counts) == sum(meter.dwell.counts) == 0


def test_dwell_ends_when_the_job_starts(meter: JobMeter, times: Times) -> None:
    times.wall, times.clock = SENT + 30.0, 107.0
    meter.turn(slot(message()), 1, 100.0, 100.02)
    assert meter.dwell.seconds == pytest.approx(23.0)


def test_dwell_counts_first_attempts_only(meter: JobMeter, times: Times) -> None:
    """Later ones include the backoff."""
    meter.turn(slot(message(attempt=2)), 1, 100.0, 100.02)
    assert sum(meter.dwell.counts) == 0


def test_a_clock_set_back_gives_no_negative_dwell(meter: JobMeter, times: Times) -> None:
    times.wall = SENT - 60.0
    meter.turn(slot(message()), 1, 100.0, 100.02)
    assert meter.dwell.seconds == 0.0


def test_messages_of_a_batch_share_its_time(meter: JobMeter, times: Times) -> None:
    def job(batch: Any, context: Any) -> None:
        times.clock += 1.0

    meter.bind_batch(job)(Batch([message(), message()]), None)  # type: ignore[arg-type]
    assert (meter.done, classes(meter), meter.durations.seconds) == (2, {0.5: 2}, 1.0)


@pytest.mark.parametrize(
    ("error", "done", "timed"),
    [(FailedAt(1), 1, 2), (FailedAt(7), 0, 2), (ValueError(), 0, 2), (NotStarted(), 0, 0)],
)
def test_a_failed_batch(meter: JobMeter, error: BaseException, done: int, timed: int) -> None:
    def job(batch: Any, context: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        meter.bind_batch(job)(Batch([message(), message()]), None)  # type: ignore[arg-type]
    assert (meter.done, sum(meter.durations.counts)) == (done, timed)


def test_the_number_of_globs_is_bounded() -> None:
    """Each is some thirty time series; the rest is counted together."""
    meters = JobMeters(lambda queue: Job(print, queue))
    for number in range(2 * MOST_GLOBS):
        meters.ended(Message(f"q-{number}", 1, None), "retry")
    assert len(meters.by_glob) == MOST_GLOBS + 1
    assert meters.by_glob[OTHERS].outcomes == {"retry": MOST_GLOBS}
