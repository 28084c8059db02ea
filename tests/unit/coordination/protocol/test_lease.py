"""The lease never outlives the leader's knowledge of the session."""

from __future__ import annotations

import pytest

from qdo.coordination.protocol.lease import GAP, REPORT, SHARE, Lease

TIMEOUT = 10.0


def test_a_session_just_opened_has_a_lease() -> None:
    """Connecting is proof by itself: the leader opens the session."""
    assert Lease(TIMEOUT, 100.0).until == 100.0 + SHARE * TIMEOUT


def test_one_transaction_proves_nothing() -> None:
    """Its follower may be cut off before it has reported the session to the leader."""
    lease = Lease(TIMEOUT, 100.0)
    lease.renew(106.0, 106.01)
    assert lease.until == 100.0 + SHARE * TIMEOUT
    assert lease.contact == 106.0


def test_concurrent_transactions_prove_nothing_after_quiet_time() -> None:
    """Within half a tick the follower may have reported neither of them."""
    lease = Lease(TIMEOUT, 100.0)
    lease.renew(106.0, 106.01)
    lease.renew(106.1, 106.11)
    assert lease.until == 100.0 + SHARE * TIMEOUT


def test_a_later_transaction_proves_the_earlier_one() -> None:
    """A contact half a tick before the sending of an acknowledged transaction has been reported."""
    lease = Lease(TIMEOUT, 100.0)
    lease.renew(106.0, 106.5)
    lease.renew(106.5 + REPORT * TIMEOUT, 108.0)
    assert lease.until == 106.0 + SHARE * TIMEOUT


def test_a_late_acknowledgement_proves_late() -> None:
    """A transaction held up on its way may have reached the follower only just now."""
    lease = Lease(TIMEOUT, 100.0)
    lease.renew(101.0, 105.0)
    lease.renew(105.5, 105.6)
    assert lease.until == 100.0 + SHARE * TIMEOUT


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
