"""What a session proves: leases, and silent servers."""

from __future__ import annotations

import pytest

from qdo.coordination.protocol.lease import GAP, REPORT, SHARE, Lease
from qdo.coordination.protocol.silence import GRACE, SILENCE, SilenceDetector

TIMEOUT = 10.0
SESSION_SECONDS = 9.0
LIMIT = SILENCE * SESSION_SECONDS


def test_a_session_just_opened_has_a_lease() -> None:
    """Connecting is proof by itself: the leader opens the session."""
    assert Lease(TIMEOUT, 100.0).until == 100.0 + SHARE * TIMEOUT


@pytest.mark.parametrize(
    ("contacts", "proven"),
    [
        # Its follower may be cut off before it has reported the session to the leader.
        ([(106.0, 106.01)], 100.0),
        # Within half a tick the follower may have reported neither of them.
        ([(106.0, 106.01), (106.1, 106.11)], 100.0),
        # A contact half a tick before an acknowledged transaction was sent has been reported.
        ([(106.0, 106.5), (106.5 + REPORT * TIMEOUT, 108.0)], 106.0),
        # A transaction held up on its way may have reached the follower only just now.
        ([(101.0, 105.0), (105.5, 105.6)], 100.0),
    ],
)
def test_a_later_transaction_proves_the_earlier_one(
    contacts: list[tuple[float, float]], proven: float
) -> None:
    """If so much time lies between them that the leader knows the earlier one."""
    lease = Lease(TIMEOUT, 100.0)
    for sent_at, answered_at in contacts:
        lease.renew(sent_at, answered_at)
    assert lease.until == proven + SHARE * TIMEOUT
    assert lease.contact == contacts[-1][0]


def test_regular_contact_keeps_three_quarters_of_the_time_out() -> None:
    """With contact every tenth of the timeout, a lease lasts this long after the last contact."""
    lease = Lease(TIMEOUT, 100.0)
    sent_at = 100.0
    for _ in range(50):
        sent_at += 0.9 * GAP * TIMEOUT
        lease.renew(sent_at, sent_at + 0.02)
    assert lease.until - sent_at == pytest.approx(0.75 * TIMEOUT, abs=0.05 * TIMEOUT)


def test_many_transactions_are_remembered_in_little_space() -> None:
    """Thousands of transactions a second prove as much as a few."""
    lease = Lease(TIMEOUT, 100.0)
    for count in range(20_000):
        lease.renew(100.0 + count / 2000, 100.001 + count / 2000)
    assert lease.until == pytest.approx(109.0 + SHARE * TIMEOUT, abs=0.03 * TIMEOUT)
    assert len(lease._unproven) <= 10


def test_an_ended_lease_stays_ended() -> None:
    """A session that is gone never comes back, whatever is still answered."""
    lease = Lease(TIMEOUT, 100.0)
    lease.end()
    lease.renew(101.0, 101.1)
    lease.renew(103.0, 103.1)
    lease.heard(103.0)
    assert lease.until == float("-inf")


# --- silence -------------------------------------------------------------------------------


def silent_at(detector: SilenceDetector, *times: float) -> float | None:
    """Return the first of the times at which the detector finds silence."""
    return next((time for time in times if detector.is_silent(time)), None)


def test_silence_is_a_third_of_the_session_without_an_answer() -> None:
    """It counts from the oldest unanswered request, however many follow it."""
    detector = SilenceDetector(SESSION_SECONDS)
    for number in range(5):
        detector.sent(100.0 + number * 0.8)
    assert detector.due() == 100.0 + LIMIT
    assert silent_at(detector, 100.0 + LIMIT - 0.1) is None
    confirmed = 100.0 + LIMIT + GRACE * SESSION_SECONDS
    assert silent_at(detector, 100.0 + LIMIT, confirmed) == confirmed


def test_each_answer_proves_that_the_server_lives() -> None:
    """The requests after it count from the answer."""
    detector = SilenceDetector(SESSION_SECONDS)
    detector.sent(100.0)
    detector.sent(102.0)
    detector.answered(102.5, unanswered=1)
    assert detector.due() == 102.5 + LIMIT
    detector.answered(103.0, unanswered=0)
    assert detector.due() == float("inf")


def test_a_blocked_process_reads_its_answers_first() -> None:
    """After a job that blocked the loop, the answers are there but not yet read."""
    detector = SilenceDetector(SESSION_SECONDS)
    detector.sent(100.0)
    assert not detector.is_silent(130.0)
    detector.answered(130.01, unanswered=0)
    assert silent_at(detector, 130.0 + SESSION_SECONDS, 130.0 + 2 * SESSION_SECONDS) is None


def test_a_dropped_connection_counts_no_more() -> None:
    """Its requests are answered by the reconnection."""
    detector = SilenceDetector(SESSION_SECONDS)
    detector.sent(100.0)
    assert not detector.is_silent(100.0 + LIMIT)
    detector.reset()
    assert detector.due() == float("inf")
    assert not detector.is_silent(200.0)
