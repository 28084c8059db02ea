"""Keeping the session of a process whose loop is blocked."""

from __future__ import annotations

from kazoo.security import ACL, Id, Permissions

from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.worker.supervisor.sessions import Session, SessionKeeper

LAYOUT = Layout.of("app")


def test_protected_nodes_do_not_end_the_keeper(coordinator_url: str, outsider: Client) -> None:
    """It cannot describe the session in its component node, and attaches to it all the same."""
    nobody = [ACL(Permissions.ADMIN, Id("ip", "127.0.0.1"))]
    outsider.ensure_path(f"{LAYOUT.components}/worker")
    outsider.set_acls(f"{LAYOUT.components}/worker", nobody)
    owner = connect(coordinator_url)
    owner.open()
    identity, password = owner.client_id
    owner.detach()
    looks = 0

    def is_blocked() -> bool:
        nonlocal looks
        looks += 1
        return looks < 4

    session = Session(coordinator_url, identity, password, LAYOUT.root, 2.0)
    keeper = SessionKeeper("process 1", session, {"blocked": True}, is_blocked)
    keeper.start()
    keeper.join(20.0)
    assert not keeper.is_alive()
    assert looks == 4
    assert keeper.kept_at > 0
