"""The action log: one entry in the transaction of each change, and never too many entries."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kazoo.security import ACL, Id, Permissions

from qdo import App
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.coordination import queue_admin, transactions
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import CheckOp, Committed, CreateOp, NoResponse, Op
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, QueueNode
from qdo.errors import AuditRefusedError, NodeRefusedError, NotFoundError
from qdo.fleet.audit import AuditTrail, read_entries
from qdo.fleet.audit_entries import MAX_ENTRIES, entry_name, surplus
from qdo.fleet.chores import AT_ONCE, SurplusChore
from qdo.ops.decisions import decide
from qdo.ops.seek import QueuePosition, SeekPlan, execute
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.leading import Chores
from tests.support.cli import QDO, Run, command
from tests.support.coordinator_process import connected
from tests.support.fleet import LAYOUT as FLEET
from tests.support.fleet import MemberFleet
from tests.support.processes import wait_until

LAYOUT = Layout.of("shop")
LOG = LAYOUT.fleet.actionlog
READ_ONLY = [ACL(Permissions.READ, Id("world", "anyone"))]


def action_log_chore() -> SurplusChore:
    return SurplusChore(lambda layout: layout.fleet.actionlog, surplus)


@pytest.fixture
def client(outsider: Client, coordinator_url: str, monkeypatch: pytest.MonkeyPatch) -> Client:
    """The coordinator of an app with one queue, which all commands use."""
    monkeypatch.setenv("QDO_APP", "shop")
    monkeypatch.setenv("QDO_COORDINATOR", coordinator_url)
    for path in LAYOUT.persistent:
        outsider.ensure_path(path)
    outsider.create(LAYOUT.queue("orders"), QueueNode(last=7).encode())
    return outsider


def seek(client: Client, last: int = 9) -> None:
    plan = SeekPlan("orders", None, QueuePosition(last), 0, 0, None)
    execute(client, LAYOUT, plan, "CRM is back")


def count(client: Client) -> int:
    return len(client.get_children(LOG))


def test_changed_documents_have_an_entry_each(client: Client, cli: Run) -> None:
    """A change that is refused has none."""
    put = ("documents", "put", "plans", "acme")
    assert cli(*put, "1", "--reason", "new plan").code == 0
    assert cli(*put, "2").code == 0
    assert cli(*put, "3", "--create").code == 5
    assert cli("documents", "delete", "plans", "acme", "--yes").code == 0
    assert cli("documents", "delete", "plans", "acme", "--yes").code == 6
    found = read_entries(client, LAYOUT, limit=10)
    assert [(each.command, each.target, each.before, each.reason) for each in found] == [
        ("documents delete", "plans/acme", {"version": 2}, ""),
        ("documents put", "plans/acme", {"version": 1}, ""),
        ("documents put", "plans/acme", {"version": None}, "new plan"),
    ]


def test_pauses_and_their_ends_have_an_entry_each(client: Client, cli: Run) -> None:
    assert cli("pause", "orders", "--no-wait", "--reason", "disk full").code == 0
    assert cli("resume", "orders", "--reason", "more room").code == 0
    assert cli("resume", "orders").code == 6
    ended, paused = read_entries(client, LAYOUT, limit=10)
    assert (paused.command, paused.target, paused.reason) == ("pause", "orders", "disk full")
    assert (ended.command, ended.target, ended.reason) == ("resume", "orders", "more room")
    assert paused.after == ended.before
    assert list((paused.after or {}).values()) == ["orders"]


@pytest.mark.parametrize("verb", ["retry", "discard"])
def test_a_change_has_its_entry_even_if_stdout_is_full(
    client: Client, coordinator_url: str, tmp_path: Path, verb: str
) -> None:
    """Dead letters change in the broker: the entry is written before the result is shown."""
    broker_url = f"sqlite:{tmp_path / 'messages.db'}"
    with App("shop", broker=broker_url) as app:
        app.send("orders", 1)
        record = DeadLetterRecord("orders", 1, b"1", None, None, "no", "", 1, "w", 1, time.time())
        app.broker.dead_letters.store(record)
    places = {"QDO_APP": "shop", "QDO_COORDINATOR": coordinator_url, "QDO_BROKER": broker_url}
    with open("/dev/full", "wb") as full:
        arguments = ("dead-letters", verb, "orders", "--all", "--yes")
        ended = command(*QDO, *arguments, cwd=tmp_path, stdout=full, env=places)
    assert ended.code == 1
    [entry] = read_entries(client, LAYOUT, limit=9)
    assert (entry.command, entry.target) == (f"dead-letters {verb}", "orders")


def test_an_entry_is_in_the_transaction_of_its_change(client: Client) -> None:
    seek(client)
    [entry] = read_entries(client, LAYOUT, limit=10)
    assert (entry.command, entry.target, entry.reason) == ("seek", "orders", "CRM is back")
    assert "@" in entry.by
    assert entry.before is not None
    assert entry.after is not None
    assert (entry.before["position"], entry.after["position"]) == (None, None)
    assert abs(entry.at - time.time()) < 60
    written = client.get(LAYOUT.fleet.log_entry(entry.id))[1].czxid
    assert written == client.get(LAYOUT.queue("orders"))[1].mzxid


def test_a_decision_on_a_message_is_logged(client: Client) -> None:
    failure = FailureRecord(8, 3, "secret body", blocked_since=1.0)
    client.set(LAYOUT.queue("orders"), QueueNode(last=7, failure=failure).encode())
    decide(client, LAYOUT, "orders", "skip", (8,))
    [entry] = read_entries(client, LAYOUT, limit=10)
    assert (entry.command, entry.before, entry.after) == (
        "skip",
        {"messages": "8", "attempts": 3},
        {"decision": "skip"},
    )
    assert b"secret" not in client.get(LAYOUT.fleet.log_entry(entry.id))[0]


def test_a_refused_change_has_no_entry(client: Client) -> None:
    client.set_acls(LAYOUT.queue("orders"), READ_ONLY)
    with pytest.raises(NodeRefusedError) as refused:
        seek(client)
    assert not isinstance(refused.value, AuditRefusedError)
    client.delete(LAYOUT.queue("orders"))
    with pytest.raises(NotFoundError):
        seek(client)
    assert count(client) == 0


def test_a_change_without_the_right_to_log_is_not_made(client: Client) -> None:
    client.set_acls(LOG, READ_ONLY)
    before = client.get(LAYOUT.queue("orders"))
    with pytest.raises(AuditRefusedError) as refused:
        seek(client)
    assert refused.value.details["path"] == LOG
    assert refused.value.exit_code == 5
    assert client.get(LAYOUT.queue("orders")) == before
    client.delete(LOG)
    client.set_acls(LAYOUT.root, READ_ONLY)
    with pytest.raises(AuditRefusedError):
        seek(client)
    assert client.get(LAYOUT.queue("orders")) == before
    fault = AuditTrail(client, LAYOUT, "retry").note("orders", {}, {})
    assert fault is not None
    assert "action log" in fault


def test_the_log_is_created_when_it_is_missing(client: Client) -> None:
    """Also when it vanishes while a change is decided."""
    client.delete(LOG)
    assert read_entries(client, LAYOUT, limit=10) == []
    with AuditTrail(client, LAYOUT, "seek").change("orders") as entry:

        def record(before: QueueNode, after: QueueNode) -> CreateOp:
            op = entry({}, {})
            if not removed:
                removed.append(op)
                client.delete(LOG)
            return op

        removed: list[CreateOp] = []
        queue_admin.seek(client, LAYOUT, "orders", 9, record=record)
    assert count(client) == 1
    assert QueueNode.parse(client.get(LAYOUT.queue("orders"))[0]).seek == 1


def lose_answers(
    monkeypatch: pytest.MonkeyPatch, lost: Callable[[Sequence[Op]], bool], performed: bool
) -> list[Sequence[Op]]:
    """Let the answers to some transactions be lost, once each; return these transactions."""
    seen: list[Sequence[Op]] = []
    commit = transactions.commit

    def answer(client: Client, ops: Sequence[Op]) -> Any:
        if lost(ops) and not seen:
            seen.append(ops)
            if performed:
                assert isinstance(commit(client, ops), Committed)
            return NoResponse()
        return commit(client, ops)

    monkeypatch.setattr(transactions, "commit", answer)
    return seen


@pytest.mark.parametrize("performed", [True, False])
def test_a_lost_answer_leaves_one_entry(
    client: Client, monkeypatch: pytest.MonkeyPatch, performed: bool
) -> None:
    """A change that was made is found by its entry; one that was not made is made again."""
    owner = LAYOUT.worker("worker-0000000001")
    client.create(owner, b"{}")
    client.set(LAYOUT.queue("orders"), QueueNode(last=7, owner="worker-0000000001").encode())
    seen = lose_answers(monkeypatch, lambda ops: len(ops) == 3, performed)
    seek(client)
    assert len(seen) == 1
    assert count(client) == 1
    assert QueueNode.parse(client.get(LAYOUT.queue("orders"))[0]).seek == 1
    assert json.loads(client.get(owner)[0])["reread"] == ["orders"]


def test_each_change_has_one_entry_over_lost_connections(
    client: Client, coordinator_url: str
) -> None:
    """A change that was sent before the loss may have been made, or not: it is made once."""
    moments = random.Random(7)
    with connected(coordinator_url) as operator:
        for number in range(1, 16):
            cut = partial(operator.drop_connection, "the test cuts it")
            cutter = threading.Timer(moments.uniform(0.0, 0.01), cut)
            cutter.start()
            seek(operator, number)
            cutter.join()
            node = QueueNode.parse(client.get(LAYOUT.queue("orders"))[0])
            assert (node.last, node.seek) == (number, number)
            assert count(client) == number


def test_an_owner_that_may_not_be_told_does_not_stop_a_seek(client: Client) -> None:
    """It finds out with its next write of the queue node."""
    owner = LAYOUT.worker("worker-0000000001")
    client.create(owner, b"{}", acl=READ_ONLY)
    client.set(LAYOUT.queue("orders"), QueueNode(last=7, owner="worker-0000000001").encode())
    seek(client)
    assert count(client) == 1
    assert client.get(owner)[0] == b"{}"
    assert QueueNode.parse(client.get(LAYOUT.queue("orders"))[0]).last == 9


# --- reading -------------------------------------------------------------------------


def add(client: Client, at: float, data: bytes = b'{"command": "seek"}') -> str:
    name = entry_name(at, "0123abcd")
    client.create(LAYOUT.fleet.log_entry(name), data)
    return name


def test_the_newest_entries_come_first(client: Client) -> None:
    now = time.time()
    old, new, newest = (add(client, now - age) for age in (500, 50, 5))
    assert [each.id for each in read_entries(client, LAYOUT, limit=2)] == [newest, new]
    assert [each.id for each in read_entries(client, LAYOUT, limit=9)] == [newest, new, old]
    assert len(read_entries(client, LAYOUT, limit=9, since=now - 100)) == 2
    [found] = read_entries(client, LAYOUT, limit=1, selects=lambda each: each.id == old)
    assert found.id == old


def test_a_forged_entry_costs_only_itself(client: Client, cli: Run) -> None:
    for number, data in enumerate((b"", b"null", b"\xff", b"[" * 5000, b'{"command": []}')):
        add(client, 1000.0 + number, data)
    client.create(f"{LOG}/zoo", b'{"command": "seek", "to": {"a": "\\u001b[31m"}}')
    client.create(LAYOUT.fleet.log_entry(entry_name(9e9, "00000000")), b"x" * 500_000)
    protected = add(client, 2000.0)
    acl = [ACL(Permissions.ALL, Id("digest", "a:b"))]
    client.set_acls(LAYOUT.fleet.log_entry(protected), acl)
    seek(client)
    items = {each["id"]: each for each in cli("audit", "-o", "json").items()}
    assert len(items) == 9
    faults = {each["command"] for each in items.values() if each["fault"] is None}
    assert faults == {"seek"}
    assert items[protected]["fault"]
    ended = cli("audit")
    assert (ended.code, "\x1b" in ended.out) == (0, False)


# --- the leader's chore --------------------------------------------------------------


def fence(client: Client) -> CheckOp:
    return CheckOp(LAYOUT.rebalancer, client.exists(LAYOUT.rebalancer).version)


def fill(client: Client, number: int, at: float) -> list[str]:
    names = [entry_name(at + each / 1000, f"{each:08x}") for each in range(number)]
    for start in range(0, number, 100):
        transaction = client.transaction()
        for name in names[start : start + 100]:
            transaction.create(LAYOUT.fleet.log_entry(name), b'{"command": "seek"}')
        transaction.commit()
    return names


def test_the_leader_deletes_the_oldest_entries(client: Client) -> None:
    names = fill(client, MAX_ENTRIES + AT_ONCE + 1, time.time() - 100)
    chore = action_log_chore()
    assert chore(client, LAYOUT, fence(client)) == AT_ONCE + 1
    assert sorted(client.get_children(LOG)) == names[AT_ONCE + 1 :]
    assert chore(client, LAYOUT, fence(client)) == 0


def test_only_the_leader_does_chores(outsider: Client, coordinator_url: str) -> None:
    fleet = MemberFleet(coordinator_url)
    try:
        members = [fleet.join()[0] for _ in range(2)]
        wait_until(lambda: any(each.leader.is_leader() for each in members), "a member leads")
        leader, other = sorted(members, key=lambda each: each.leader.is_leader(), reverse=True)
        name = entry_name(1000.0, "0123abcd")
        path = FLEET.fleet.log_entry(name)
        outsider.create(path, b"")
        duties = [Chores(CurrentMember(each), period_seconds=1.0) for each in (other, leader)]
        duties[0].step(other)
        assert outsider.exists(path)
        assert other.leader.with_fence(action_log_chore()) == 0
        duties[1].step(leader)
        assert not outsider.exists(path)
    finally:
        fleet.close()


def test_a_deposed_leader_deletes_nothing(client: Client) -> None:
    fill(client, 150, 1000.0)
    old = fence(client)
    client.set(LAYOUT.rebalancer, b'{"worker": "worker-0000000002"}')
    assert action_log_chore()(client, LAYOUT, old) == 0
    assert count(client) == 150
    assert action_log_chore()(client, LAYOUT, fence(client)) == 150


def test_an_entry_that_cannot_be_deleted_costs_only_itself(client: Client) -> None:
    names = fill(client, 120, 1000.0)
    for name in names[5:8]:
        client.create(f"{LAYOUT.fleet.log_entry(name)}/below", b"")
    chore = action_log_chore()
    assert chore(client, LAYOUT, fence(client)) == 117
    assert sorted(client.get_children(LOG)) == names[5:8]
    fill(client, 1, 2000.0)
    assert chore(client, LAYOUT, fence(client)) == 1
    client.delete(LOG, recursive=True)
    assert chore(client, LAYOUT, fence(client)) == 0
