"""The coordinator is away for longer than leases and session timeouts, and comes back."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kazoo.exceptions import ConnectionDropped
from kazoo.protocol.connection import _CONNECTION_DROP
from kazoo.protocol.states import KazooState

from qdo.coordination.client import Client, connect
from qdo.errors import DatabaseFullError
from qdo.system.clock import clock
from tests.support.coordinator_process import connected
from tests.support.fleet import MemberFleet
from tests.support.postgresql.proxy import cutting
from tests.support.processes import wait_until
from tests.support.zookeeper import Ensemble, free_ports

SESSION_SECONDS = 4.0
"""The default of `MemberFleet`."""


def test_workers_wait_out_an_outage_and_nothing_moves(
    zookeeper_server: Ensemble, tmp_path: Path, open_fleet: Callable[..., MemberFleet]
) -> None:
    """No message starts after the lease; the same sessions continue with the same claims."""
    own = Ensemble(tmp_path, 1)
    own.start()
    try:
        # A busy machine takes seconds to start a JVM, which then counts the sessions' timeouts.
        fleet = open_fleet(own.url(), session_timeout_seconds=6.0)
        fleet.join()
        fleet.join()
        fleet.create_queues([f"q{number}" for number in range(10)])
        fleet.wait(lambda: fleet.balanced(10), "all is owned")
        before = {c.queue: c.fence for _, e in fleet.members for c in e.claims.values()}
        own.servers[0].kill()
        away_since = clock()
        _wait_for_silence(fleet)
        started = len(fleet.ledger)
        wait_until(lambda: clock() - away_since > 13.0, "two session timeouts are over")
        assert len(fleet.ledger) == started
        own.servers[0].restart()
        wait_until(lambda: len(fleet.ledger) > started + 20, "messages are processed again", 30.0)
        fleet.wait(lambda: fleet.balanced(10), "all is settled")
        after = {c.queue: c.fence for _, e in fleet.members for c in e.claims.values()}
        assert after == before
        fleet.close()
    finally:
        own.close()


def _wait_for_silence(fleet: MemberFleet) -> None:
    leases = [member.lease for member, _ in fleet.members]
    wait_until(lambda: all(clock() > lease.until for lease in leases), "leases are over", 10.0)
    # Messages started just before are in the ledger after the next round of the stepper.
    rounds = fleet.rounds
    wait_until(lambda: fleet.rounds > rounds + 1, "the engine has come round", 10.0)


def test_a_leader_change_moves_nothing(
    zookeeper_ensemble: Ensemble, ensemble_url: str, open_fleet: Callable[..., MemberFleet]
) -> None:
    """With the leading server killed the sessions live on, and so do the claims."""
    fleet = open_fleet(ensemble_url)
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


def test_a_worker_leaves_a_silent_server_and_keeps_its_session(
    zookeeper_ensemble: Ensemble, ensemble_url: str, open_fleet: Callable[..., MemberFleet]
) -> None:
    """A frozen server closes no connection. Its client resumes on another within the lease."""
    followers = [each for each in zookeeper_ensemble.servers if each.mode() == "follower"]
    hosts = ",".join(each.address for each in followers)
    chroot = ensemble_url.removeprefix("zookeeper://").partition("/")[2]
    fleet = open_fleet(f"zookeeper://{hosts}/{chroot}")
    member, engine = fleet.join()
    fleet.create_queues([f"q{number}" for number in range(5)])
    fleet.wait(lambda: fleet.balanced(5), "all is owned")
    before = {claim.queue: claim.fence for claim in engine.claims.values()}
    silent = next(each for each in followers if each.address == member._client.server)

    def stalled() -> str:
        modes = [each.mode() or "silent" for each in zookeeper_ensemble.servers]
        return f"messages continue; found {fleet.found()}, {modes}"

    silent.stop()
    try:
        began = clock()
        while clock() - began < 2 * SESSION_SECONDS:
            started = len(fleet.ledger)
            leased = member.lease.until
            wait_until(lambda: len(fleet.ledger) > started, stalled, 30.0)  # noqa: B023
            assert clock() < leased, "no message waited for another lease"
        assert member._client.server != silent.address
        after = {claim.queue: claim.fence for claim in engine.claims.values()}
        assert after == before
        assert engine.expirations == 0
    finally:
        silent.cont()
        fleet.close()


def test_a_server_that_answers_late_resumes_a_session(
    zookeeper_server: Ensemble, caplog: pytest.LogCaptureFixture
) -> None:
    """Later than the first attempts wait: those after them wait longer."""
    with cutting(zookeeper_server.servers[0].port) as proxy, opened(proxy.port) as client:
        session = client.client_id
        proxy.late_seconds = 0.4 * SESSION_SECONDS
        proxy.cut_all()
        wait_until(lambda: client.state == KazooState.SUSPENDED, "the connection is lost", 5.0)
        wait_until(lambda: client.connected, "the client is back", SESSION_SECONDS + 5.0)
        assert client.client_id == session
    (record,) = [each for each in caplog.records if each.name == "qdo.coordination.client"]
    assert record.levelname == "WARNING"


def test_a_session_that_no_answer_confirms_ends(zookeeper_server: Ensemble) -> None:
    """Its client asks for it no more, so the servers end it, and others take the queues."""
    with (
        cutting(zookeeper_server.servers[0].port) as proxy,
        opened(proxy.port) as client,
        opened(zookeeper_server.servers[0].port) as other,
    ):
        client.create("/late", ephemeral=True)
        proxy.late_seconds = 2 * SESSION_SECONDS
        proxy.cut_all()
        wait_until(
            lambda: other.exists("/late") is None, "its node is gone", 4 * SESSION_SECONDS + 5.0
        )
        proxy.late_seconds = 0.0
        wait_until(lambda: client.connected, "it has a new session", 4 * SESSION_SECONDS)


@pytest.mark.parametrize("left", ["nothing", "an older copy"])
def test_servers_without_their_data_get_new_sessions(
    tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They refuse a session whose client has seen later transactions, and the log names them."""
    own = Ensemble(tmp_path, 1)
    own.start()
    (server,) = own.servers
    data, copy = server.folder / "data", tmp_path / "copy"
    try:
        server.kill()
        shutil.copytree(data, copy)
        server.restart()
        with opened(server.port) as client:
            session = client.client_id
            client.create("/seen")
            server.kill()
            shutil.rmtree(data)
            if left == "nothing":
                data.mkdir()
            else:
                shutil.copytree(copy, data)
            server.restart()
            wait_until(
                lambda: client.client_id not in (None, session),
                "it has a new session",
                4 * SESSION_SECONDS,
            )
            assert client.exists("/seen") is None
        (*_, record) = [each for each in caplog.records if each.name == "qdo.coordination.client"]
        assert isinstance(record.args, tuple)
        assert (record.levelname, record.args[0]) == ("WARNING", server.address)
    finally:
        own.close()


def opened(port: int) -> contextlib.AbstractContextManager[Client]:
    """Open a client of a server, or of a proxy before it."""
    return connected(f"zookeeper://127.0.0.1:{port}", session_timeout_seconds=SESSION_SECONDS)


def test_the_lost_server_is_named_not_the_next_one(zookeeper_server: Ensemble) -> None:
    """A client tries the next server before a worker logs that it has lost the last one."""
    with connected(zookeeper_server.url()) as client:
        with contextlib.suppress(ConnectionDropped):
            client._connection._connect("127.0.0.1", "127.0.0.1", free_ports(1)[0])
        assert client.lost_server() == zookeeper_server.servers[0].address


def test_a_refused_request_ends_no_member(
    coordinator_url: str, monkeypatch: pytest.MonkeyPatch, open_fleet: Callable[..., MemberFleet]
) -> None:
    """Errors such as a full disk count as lost answers: the same claims continue afterwards."""
    fleet = open_fleet(coordinator_url)
    member, engine = fleet.join()
    fleet.create_queues([f"q{number}" for number in range(3)])
    fleet.wait(lambda: fleet.balanced(3), "all is owned")
    before = {claim.queue: claim.fence for claim in engine.claims.values()}
    call, refused = member._client._call, []

    def refusing(request: Any, answer: Any) -> Any:
        if request is not _CONNECTION_DROP and len(refused) < 20:
            refused.append(request)
            return answer.set_exception(DatabaseFullError(path="x.db", reason="disk is full"))
        return call(request, answer)

    monkeypatch.setattr(member._client, "_call", refusing)
    fleet.wait(lambda: len(refused) == 20, "requests were refused")
    started = len(fleet.ledger)
    fleet.wait(lambda: len(fleet.ledger) > started + 50, "messages are processed again")
    fleet.wait(lambda: fleet.balanced(3), "all is settled")
    assert {claim.queue: claim.fence for claim in engine.claims.values()} == before
    assert engine.expirations == 0
    fleet.close()


def test_a_session_is_over_only_if_the_coordinator_says_so(tmp_path: Path) -> None:
    """A client that stops without an answer leaves a session behind, and knows it."""
    own = Ensemble(tmp_path, 1)
    own.start()
    try:
        polite, cut_off = connect(own.url()), connect(own.url())
        for client in (polite, cut_off):
            client.open()
            assert not client.session_over
        polite.stop()
        assert polite.session_over
        own.servers[0].kill()
        cut_off.stop()
        assert not cut_off.session_over
        for client in (polite, cut_off):
            client.close()
    finally:
        own.close()
