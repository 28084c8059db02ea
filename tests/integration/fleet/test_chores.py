"""What the leader cleans up, when it did so, and `qdo doctor`."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator

import pytest
from kazoo.exceptions import NoNodeError, NotEmptyError
from kazoo.security import ACL, Id, Permissions

from qdo import App
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp
from qdo.fleet.audit_entries import AuditEntry
from qdo.fleet.chores import (
    IDLE_SECONDS,
    ChoreRecord,
    CopiedActionsChore,
    EmptyLocksChore,
    read_records,
    write_records,
)
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.leading import Chores
from tests.support.cli import Run
from tests.support.fakes.clocks import SettableClock
from tests.support.fleet import LAYOUT, MemberFleet
from tests.support.processes import wait_until

LOCKS = LAYOUT.fleet.locks
NO_RIGHTS = [ACL(Permissions.ALL, Id("digest", "a:b"))]
CHORES = ["lost-actions", "action-outputs", "action-log", "format-level", "live-settings"]


@pytest.fixture
def client(outsider: Client) -> Client:
    for path in (*LAYOUT.persistent, LOCKS):
        outsider.retry(outsider.ensure_path, path)  # a starved connection is lost
    return outsider


@pytest.fixture
def app(coordinator_url: str) -> Iterator[App]:
    with App("fleet", coordinator=coordinator_url) as app:
        yield app


def fence(client: Client) -> CheckOp:
    return CheckOp(LAYOUT.rebalancer, client.exists(LAYOUT.rebalancer).version)


def later(chore: EmptyLocksChore, client: Client, now: SettableClock[float], seconds: float) -> int:
    now.now += seconds
    return chore(client, LAYOUT, fence(client))


# --- locks without a use --------------------------------------------------------------


def test_a_lock_is_deleted_an_hour_after_its_last_use(client: Client, app: App) -> None:
    """In use are those that are held, and those that were held for a moment meanwhile."""
    for name in ("idle", "often"):
        with app.lock(name):
            pass
    now = SettableClock(1000.0)
    chore = EmptyLocksChore(now)
    with app.lock("held"):
        assert later(chore, client, now, 0) == 0
        assert later(chore, client, now, IDLE_SECONDS / 2) == 0
        with app.lock("often"):
            pass
        assert later(chore, client, now, IDLE_SECONDS / 2) == 1
        assert sorted(client.get_children(LOCKS)) == ["held", "often"]
        assert later(chore, client, now, IDLE_SECONDS) == 1
        assert client.get_children(LOCKS) == ["held"]
    assert later(chore, client, now, 1.0) == 0
    assert later(chore, client, now, IDLE_SECONDS) == 1


def test_a_deleted_lock_is_made_again(client: Client, app: App) -> None:
    """Also by a process that has used it before, with a larger fence."""
    with app.lock("export") as first:
        pass
    now = SettableClock(1000.0)
    chore = EmptyLocksChore(now)
    later(chore, client, now, 0)
    assert later(chore, client, now, IDLE_SECONDS) == 1
    with app.lock("export", timeout_seconds=20.0) as second:
        assert client.get_children(f"{LOCKS}/export")
        assert second.fence > first.fence


def test_locks_work_while_their_folders_are_deleted(client: Client, app: App) -> None:
    """Whatever the moment of the deletion is, the lock is held, with a larger fence each time."""
    ended = threading.Event()
    deletions = []

    def delete() -> None:
        while not ended.is_set():
            with contextlib.suppress(NotEmptyError, NoNodeError):
                client.delete(f"{LOCKS}/export")
                deletions.append(1)

    deleting = threading.Thread(target=delete)
    deleting.start()
    fences = []
    try:
        while len(fences) < 1000 and (len(fences) < 100 or len(deletions) < 20):
            with app.lock("export", timeout_seconds=30.0) as held:
                fences.append(held.fence)
    finally:
        ended.set()
        deleting.join()
    assert len(deletions) >= 20
    assert fences == sorted(set(fences))


def test_a_deposed_leader_deletes_no_lock(client: Client, app: App) -> None:
    with app.lock("export"):
        pass
    now, old = SettableClock(1000.0), fence(client)
    chore = EmptyLocksChore(now)
    chore(client, LAYOUT, old)
    now.now += IDLE_SECONDS
    client.set(LAYOUT.rebalancer, b'{"worker": "worker-0000000002"}')
    assert chore(client, LAYOUT, old) == 0
    assert chore(client, LAYOUT, fence(client)) == 1


def test_hostile_folders_cost_only_themselves(client: Client, app: App) -> None:
    with app.lock("export"):
        pass
    client.create(f"{LOCKS}/foreign/x/y", b"null", makepath=True)
    client.create(f"{LOCKS}/protected")
    client.set_acls(f"{LOCKS}/protected", NO_RIGHTS)
    now = SettableClock(1000.0)
    chore = EmptyLocksChore(now)
    later(chore, client, now, 0)
    assert later(chore, client, now, IDLE_SECONDS) >= 1
    left = client.get_children(LOCKS)
    assert "export" not in left
    assert "foreign" in left


# --- the copy of the action log ------------------------------------------------------------


def test_each_change_is_passed_on_once(client: Client) -> None:
    """A new leader passes on all of them again, because it does not know what is stored."""
    log, kept = LAYOUT.fleet.log_entry, []
    client.create(log("1000000000000-0123abcd"), b'{"command": "seek"}')
    client.create(log("forged"), b"null")
    client.create(log("1000000000001-0123abcd"), b'{"command": "seek"}', acl=NO_RIGHTS)

    def keep(entry: AuditEntry) -> bool:
        kept.append(entry.id)
        return len(kept) != 2

    chore = CopiedActionsChore(keep)
    for _ in range(2):
        assert chore(client, LAYOUT, fence(client)) == 0
        assert kept == ["1000000000000-0123abcd"]
    client.create(log("1000000000002-0123abcd"), b'{"command": "seek"}')
    for _ in range(3):  # there is no room at first
        chore(client, LAYOUT, fence(client))
    assert kept[1:] == ["1000000000002-0123abcd"] * 2
    CopiedActionsChore(keep)(client, LAYOUT, fence(client))
    assert len(kept) == 5


# --- records -----------------------------------------------------------------------------


def listed(cli: Run, coordinator_url: str) -> tuple[str, str]:
    """Return status and sentence of the check of `qdo doctor`."""
    ended = cli("doctor", "--app", "fleet", "--coordinator", coordinator_url, "-o", "json")
    assert ended.code in (0, 1)
    assert "\x1b" not in ended.out
    (found,) = (each for each in ended.items(ended.code) if each["check"] == "chores")
    return found["status"], found["reason"]


def test_the_leader_writes_down_its_chores(client: Client, coordinator_url: str, cli: Run) -> None:
    assert listed(cli, coordinator_url)[0] == "ok"
    fleet = MemberFleet(coordinator_url)
    try:
        member, _ = fleet.join()
        wait_until(member.leader.is_leader, "the member leads")
        client.create(LAYOUT.fleet.log_entry("1000000000000-0123abcd"), b"")
        Chores(CurrentMember(member)).step(member)
        status, said = listed(cli, coordinator_url)
        assert status == "ok"
        assert re.fullmatch(rf"{member.name} did \d+ chores \d+s ago, and deleted 1 node", said)
        client.create(LAYOUT.fleet.log_entry("1000000000001-0123abcd"), b"")
        client.set_acls(LAYOUT.fleet.actionoutput, NO_RIGHTS)
        began = time.time()
        Chores(CurrentMember(member)).step(member)
        records, _ = read_records(client, LAYOUT)
        assert [each.chore for each in records] == [*CHORES, "empty-locks"]
        found = {each.chore: each for each in records}
        assert (found["action-log"].deleted, found["action-log"].fault) == (1, None)
        assert LAYOUT.fleet.actionoutput in (found["action-outputs"].fault or "")
        assert {each.leader for each in records} == {member.name}
        status, said = listed(cli, coordinator_url)
        assert (status, "action-outputs (" in said) == ("warning", True)
        assert all(began - 1 < (each.at or 0) <= time.time() for each in records)
    finally:
        fleet.close()


def test_a_deposed_leader_writes_down_nothing(client: Client) -> None:
    old = fence(client)
    client.set(LAYOUT.rebalancer, b'{"worker": "worker-0000000002"}')
    write_records(client, LAYOUT, old, "worker-0000000001", [ChoreRecord("action-log", 1.0)])
    assert not client.exists(LAYOUT.fleet.chores)
    write_records(client, LAYOUT, fence(client), "worker-0000000002", [ChoreRecord("a", 1.0)])
    write_records(client, LAYOUT, old, "worker-0000000001", [ChoreRecord("b", 1.0)])
    assert [each.chore for each in read_records(client, LAYOUT)[0]] == ["a"]


FORGED = (
    b"null",
    b"\xff",
    b"[" * 5000,
    b'{"chores": []}',
    b'{"chores": {"a": 1, "b\\u001b[31m": {"at": "x", "seconds": NaN, "deleted": 1e400}}}',
    b'{"chores": {"a": {"at": 1e300, "fault": ["x"]}}, "leader": 7}',
    b"x" * 500_000,
)


def test_forged_records(client: Client, coordinator_url: str, cli: Run) -> None:
    client.ensure_path(LAYOUT.fleet.chores)
    for data in FORGED:
        client.set(LAYOUT.fleet.chores, data)
        assert listed(cli, coordinator_url)[0] in ("ok", "unknown", "warning"), data[:80]
