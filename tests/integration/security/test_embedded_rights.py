"""Accounts and rights with the embedded coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from kazoo.exceptions import NoAuthError

from tests.support.security.fleet import LAYOUT, SecureFleet


@pytest.mark.slow
def test_digest_accounts_with_the_embedded_coordinator(tmp_path: Path) -> None:
    """A worker's nodes refuse other accounts, and `qdo acl apply` changes them."""
    fleet = SecureFleet(tmp_path / "app", coordinator=f"sqlite:{tmp_path}/c.db")
    mine = fleet.config(acl="required", **fleet.login("digest:app", "one"))
    other = fleet.config(acl="required", **fleet.login("digest:app", "two"))
    with fleet.worker(mine):
        fleet.process("a", 1, mine)
        refused = fleet.worker_ends(other)
        assert refused.code == 5
        with fleet.client(other) as client, pytest.raises(NoAuthError):
            client.get(LAYOUT.queue("a"))
    account = fleet.qdo("acl account", config=other).out.strip()
    both = fleet.config(
        acl="required",
        acl_workers=[fleet.qdo("acl account", config=mine).out.strip()],
        acl_monitors=[account],
        **fleet.login("digest:app", "one"),
    )
    assert fleet.qdo("acl apply", config=both).code == 0
    with fleet.client(other) as client:
        client.get(LAYOUT.queue("a"))
        with pytest.raises(NoAuthError):
            client.set(LAYOUT.queue("a"), b"")
