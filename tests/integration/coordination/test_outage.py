"""The coordinator is away for longer than leases and session timeouts, and comes back."""

from __future__ import annotations

from pathlib import Path

from qdo.system.clock import clock
from tests.support.fleet import MemberFleet
from tests.support.zookeeper import Ensemble, wait_until


def test_workers_wait_out_an_outage_and_nothing_moves(
    zookeeper_server: Ensemble, tmp_path: Path
) -> None:
    """No message starts after the lease; the same sessions continue with the same claims."""
    own = Ensemble(tmp_path, 1)
    own.start()
    try:
        fleet = MemberFleet(own.url(), session_timeout_seconds=3.0)
        fleet.join()
        fleet.join()
        fleet.create_queues([f"q{number}" for number in range(10)])
        fleet.wait(lambda: fleet.balanced(10), "all is owned")
        before = {c.queue: c.fence for _, e in fleet.members for c in e.claims.values()}
        own.servers[0].kill()
        away_since = clock()
        _wait_for_silence(fleet)
        started = len(fleet.ledger)
        wait_until(lambda: clock() - away_since > 7.0, 20.0, "two session timeouts are over")
        assert len(fleet.ledger) == started
        own.servers[0].restart()
        wait_until(lambda: len(fleet.ledger) > started + 20, 30.0, "messages are processed again")
        fleet.wait(lambda: fleet.balanced(10), "all is settled")
        after = {c.queue: c.fence for _, e in fleet.members for c in e.claims.values()}
        assert after == before
        fleet.close()
    finally:
        own.close()


def _wait_for_silence(fleet: MemberFleet) -> None:
    leases = [member.lease for member, _ in fleet.members]
    wait_until(lambda: all(clock() > lease.until for lease in leases), 10.0, "leases are over")
    # Messages started just before are in the ledger after the next round of the stepper.
    rounds = fleet.rounds
    wait_until(lambda: fleet.rounds > rounds + 1, 10.0, "the engine has come round")


def test_a_leader_change_moves_nothing(zookeeper_ensemble: Ensemble, ensemble_url: str) -> None:
    """With the leading server killed the sessions live on, and so do the claims."""
    fleet = MemberFleet(ensemble_url)
    fleet.join()
    fleet.join()
    fleet.create_queues([f"q{number}" for number in range(10)])
    fleet.wait(lambda: fleet.balanced(10), "all is owned")
    before = {c.queue: c.fence for _, e in fleet.members for c in e.claims.values()}
    leader = zookeeper_ensemble.leader()
    leader.kill()
    try:
        for member, engine in fleet.members:
            claim = next(iter(engine.claims.values()))
            assert member.record(claim, 30.0)
        fleet.wait(lambda: fleet.balanced(10), "all is settled")
        after = {c.queue: c.fence for _, e in fleet.members for c in e.claims.values()}
        assert after == before
    finally:
        leader.restart()
        fleet.close()
