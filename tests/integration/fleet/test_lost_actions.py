"""The leader ends what workers that are gone were asked for."""

from __future__ import annotations

import time

import pytest
from kazoo.security import ACL, Id, Permissions

from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.action_machine import PARENT, RUNNING, Action
from qdo.fleet.actions import ask_workers, list_workers, matching
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import (
    KEEP_OUTPUT_SECONDS,
    MAX_OUTPUTS,
    AuditEntry,
    entry_name,
    old_outputs,
)
from qdo.fleet.chores import LostActionsChore, SurplusChore

LAYOUT = Layout.of("shop")
FLEET = LAYOUT.fleet
GONE, HERE = "worker-0000000001", "worker-0000000002"


@pytest.fixture
def client(outsider: Client) -> Client:
    for path in LAYOUT.persistent:
        outsider.ensure_path(path)
    for name in (GONE, HERE):
        outsider.create(LAYOUT.worker(name), b"{}")
    return outsider


def fence(client: Client) -> CheckOp:
    return CheckOp(LAYOUT.rebalancer, client.exists(LAYOUT.rebalancer).version)


def clean(client: Client) -> int:
    return LostActionsChore()(client, LAYOUT, fence(client))


def entries(client: Client) -> list[AuditEntry]:
    return read_entries(client, LAYOUT, limit=1000)


def ask(client: Client, *workers: str) -> None:
    ask_workers(client, LAYOUT, workers, "ping", {}, within_seconds=60.0, reason="to see")


def test_actions_of_gone_workers_are_lost(client: Client) -> None:
    """F-1.5. Those of others stay, and a repetition changes nothing."""
    ask(client, GONE, HERE)
    node = Action("drain", {"n": 1}, time.time(), "ann@office", "", RUNNING, PARENT)
    begun = entry_name(time.time(), "0" * 8)
    client.create(f"{FLEET.actions_of(GONE)}/{begun}", node.encode())
    assert clean(client) == 0
    client.delete(LAYOUT.worker(GONE))
    assert clean(client) == 3
    assert client.get_children(FLEET.actions) == [HERE]
    assert len(client.get_children(FLEET.actions_of(HERE))) == 1
    found = {each.command: each for each in entries(client)}
    assert {each.target for each in found.values()} == {GONE}
    lost = {"outcome": "lost", "result": "the worker is gone; it had begun", "n": 1}
    assert found["action drain"].after == lost
    assert found["action drain"].id == begun
    assert found["action ping"].reason == "to see"
    assert clean(client) == 0
    assert len(entries(client)) == 2


def test_nothing_is_asked_of_gone_workers(client: Client) -> None:
    client.delete(LAYOUT.worker(GONE))
    [asked, other] = ask_workers(client, LAYOUT, [GONE, HERE], "ping", {}, within_seconds=60.0)
    assert (asked.outcome, other.outcome) == ("lost", "unanswered")
    assert client.get_children(FLEET.actions) == [HERE]
    assert matching(list_workers(client, LAYOUT), "worker-*1") == []


def test_a_deposed_leader_ends_nothing(client: Client) -> None:
    ask(client, GONE)
    client.delete(LAYOUT.worker(GONE))
    old = fence(client)
    client.set(LAYOUT.rebalancer, b"{}")
    assert LostActionsChore()(client, LAYOUT, old) == 0
    assert entries(client) == []
    assert clean(client) == 2


def test_forged_nodes_of_gone_workers_cost_only_themselves(client: Client) -> None:
    """They are deleted with an entry, unless they have nodes below them."""
    ask(client, GONE)
    client.delete(LAYOUT.worker(GONE))
    folder = FLEET.actions_of(GONE)
    taken, protected, deep = (entry_name(1000.0 + n, "0" * 8) for n in range(3))
    client.create(FLEET.log_entry(taken), b'{"command": "seek"}')
    for name in (taken, protected, deep, "zoo"):
        client.create(f"{folder}/{name}", b"\xff")
    client.create(f"{folder}/{deep}/below", b"")
    acl = [ACL(Permissions.ALL, Id("digest", "a:b"))]
    client.set_acls(f"{folder}/{protected}", acl)
    client.create(FLEET.actions_of("zoo"), b"")
    assert clean(client) == 5
    assert client.get_children(folder) == [deep]
    assert client.get_children(FLEET.actions) == [GONE]
    assert client.get(FLEET.log_entry(taken))[0] == b'{"command": "seek"}'
    outcomes = [(each.after or {}).get("outcome") for each in entries(client)]
    assert outcomes.count("lost") == 4


def test_old_outputs_are_deleted(client: Client) -> None:
    now = time.time()
    old = entry_name(now - KEEP_OUTPUT_SECONDS - 1, "0" * 8)
    names = [entry_name(now - 100 + n, "0" * 8) for n in range(MAX_OUTPUTS + 5)]
    for name in (old, *names):
        client.create(f"{FLEET.actionoutput}/{name}", b"stack")
    chore = SurplusChore(lambda layout: layout.fleet.actionoutput, old_outputs)
    assert chore(client, LAYOUT, fence(client)) == 6
    assert sorted(client.get_children(FLEET.actionoutput)) == names[5:]
