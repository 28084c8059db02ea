"""A server that accepts requests and does not answer is noticed; a busy process is not to blame."""

from __future__ import annotations

from qdo.coordination.protocol.silence import GRACE, SILENCE, SilenceDetector

TIMEOUT = 9.0
LIMIT = SILENCE * TIMEOUT


def silent_at(detector: SilenceDetector, *times: float) -> float | None:
    """Return the first of the times at which the detector finds silence."""
    return next((time for time in times if detector.is_silent(time)), None)


def test_silence_is_a_third_of_the_session_without_an_answer() -> None:
    """It counts from the oldest unanswered request, however many follow it."""
    detector = SilenceDetector(TIMEOUT)
    for number in range(5):
        detector.sent(100.0 + number * 0.8)
    assert detector.due() == 100.0 + LIMIT
    assert silent_at(detector, 100.0 + LIMIT - 0.1) is None
    confirmed = 100.0 + LIMIT + GRACE * TIMEOUT
    assert silent_at(detector, 100.0 + LIMIT, confirmed) == confirmed


def test_each_answer_proves_that_the_server_lives() -> None:
    """The requests after it count from the answer."""
    detector = SilenceDetector(TIMEOUT)
    detector.sent(100.0)
    detector.sent(102.0)
    detector.answered(102.5, unanswered=1)
    assert detector.due() == 102.5 + LIMIT
    detector.answered(103.0, unanswered=0)
    assert detector.due() == float("inf")


def test_a_blocked_process_reads_its_answers_first() -> None:
    """After a job that blocked the loop, the answers are there but not yet read."""
    detector = SilenceDetector(TIMEOUT)
    detector.sent(100.0)
    assert not detector.is_silent(130.0)
    detector.answered(130.01, unanswered=0)
    assert silent_at(detector, 130.0 + TIMEOUT, 130.0 + 2 * TIMEOUT) is None


def test_a_dropped_connection_counts_no_more() -> None:
    """Its requests are answered by the reconnection."""
    detector = SilenceDetector(TIMEOUT)
    detector.sent(100.0)
    assert not detector.is_silent(100.0 + LIMIT)
    detector.reset()
    assert detector.due() == float("inf")
    assert not detector.is_silent(200.0)
