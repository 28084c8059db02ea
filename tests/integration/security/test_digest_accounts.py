"""Digest accounts and their rights, with the embedded coordinator and with ZooKeeper."""

from __future__ import annotations

from pathlib import Path

import pytest
from kazoo.exceptions import NoAuthError

from qdo.settings.coordinator_access import coordinator_access
from tests.support.security.fleet import LAYOUT, SecureFleet


@pytest.fixture
def fleet(tmp_path: Path, coordinator_url: str) -> SecureFleet:
    return SecureFleet(tmp_path / "app", coordinator=coordinator_url)


@pytest.mark.slow
def test_rights_of_digest_accounts(fleet: SecureFleet) -> None:
    """A worker's nodes refuse the same name with another password, until it becomes a monitor."""
    mine = fleet.config(acl="required", **fleet.login("digest:app", "one"))
    other = fleet.config(acl="required", **fleet.login("digest:app", "two"))
    with fleet.worker(mine):
        fleet.process("a", 1, mine)
        assert fleet.worker_ends(other).code == 5
        with fleet.client(other) as client, pytest.raises(NoAuthError):
            client.get(LAYOUT.queue("a"))
    accounts = [fleet.qdo("admin acl account", config=each).out.strip() for each in (mine, other)]
    lists = {"acl": "required", "acl_workers": accounts[:1], "acl_monitors": accounts[1:]}
    mine = fleet.config(**lists, **fleet.login("digest:app", "one"))
    other = fleet.config(**lists, **fleet.login("digest:app", "two"))
    assert fleet.qdo("admin acl apply", "--yes", config=mine).code == 0
    # The coordinator masks digests for this account.
    checked = fleet.qdo("admin acl check", config=other)
    assert (checked.code, checked.out) == (0, "")
    with fleet.client(other) as client:
        client.get(LAYOUT.queue("a"))
        with pytest.raises(NoAuthError):
            client.set(LAYOUT.queue("a"), b"")


def test_a_debug_log_has_no_digests(tmp_path: Path, zookeeper_url: str) -> None:
    """An operator may ask a worker for it, and it often leaves the host."""
    fleet = SecureFleet(tmp_path / "app", coordinator=zookeeper_url)
    login = fleet.login("digest:app", "the-password-of-app")
    mine = fleet.config(acl="required", log_level="debug", **login)
    account = coordinator_access(fleet.settings(mine), LAYOUT).account
    assert account is not None
    digest = account.identity.id.partition(":")[2]
    with fleet.worker(mine) as worker:
        fleet.process("a", 1, mine)
    assert "'app:***'" in worker.output
    for secret in (digest, "the-password-of-app"):
        assert secret not in worker.output


@pytest.mark.parametrize("chroot", ["", "/made"])
def test_accounts_that_servers_do_not_know(tmp_path: Path, zookeeper_url: str, chroot: str) -> None:
    """Exit code 2: these servers have no provider of SASL."""
    fleet = SecureFleet(tmp_path / "app", coordinator=f"{zookeeper_url}{chroot}")
    if not chroot:
        with fleet.client(fleet.config()):
            pass  # creates the chroot of this test
    ended = fleet.worker_ends(fleet.config(acl="account", acl_workers=["sasl:app"]))
    assert ended.code == 2
    assert "setting acl" in ended.err
