"""Hostile nodes beside healthy queues: each costs itself only, on each kind of coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.exceptions import NodeExistsError
from kazoo.protocol.serialization import Create, SetData
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

from qdo.coordination.client import Client
from qdo.coordination.protocol import acquisition, assignments, rebalancer
from qdo.coordination.queue_admin import seek
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import parse_assignment
from tests.support.fleet import LAYOUT, MemberFleet
from tests.support.processes import wait_until

HEALTHY = [f"queue-{number}" for number in range(6)]
NOBODY = [make_acl("digest", "nobody:AAAAAAAAAAAAAAAAAAAAAAAAAAA=", all=True)]
READ_ONLY = [make_acl("world", "anyone", read=True, admin=True)]
OPEN = OPEN_ACL_UNSAFE
VALUES = {
    "null": None,
    "empty": b"",
    "number": b"5",
    "no text": b"\xff",
    "brackets": b"[" * 100_000,
    "digits": b'{"last": "' + b"7" * 5000 + b'"}',
    "deep": b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep enough": b'{"x": ' + b"[" * 500 + b"]" * 500 + b"}",
    "giant": b'{"last": "", "x": "' + b"x" * 900_000 + b'"}',
    "grows": b'{"last": "", "x": [' + b"1e15, " * 20_000 + b"0]}",
    "not a number": b'{"last": "", "x": NaN}',
    "infinite": b'{"last": "", "x": 1e999}',
    "too large": b'{"last": "9223372036854775807"}',
    "surrogate": b'{"last": "\\ud800", "owner": "\\udc00"}',
}
USABLE = {"null", "empty"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused nodes are tried again soon."""
    monkeypatch.setattr(acquisition, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(assignments, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(assignments, "REREAD_SECONDS", 1.0)
    monkeypatch.setattr(rebalancer, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(rebalancer, "RECONCILE_SECONDS", 1.0)


@pytest.fixture
def fleet(coordinator_url: str, open_fleet: Callable[..., MemberFleet]) -> MemberFleet:
    """Two workers that share the healthy queues."""
    fleet = open_fleet(coordinator_url)
    fleet.join()
    fleet.join()
    fleet.create_queues(HEALTHY)
    fleet.wait(lambda: fleet.balanced(len(HEALTHY)), "the healthy queues are shared")
    return fleet


def create(client: Client, path: str, data: bytes | None) -> None:
    """Create a node, also one without data as zkCli.sh does: kazoo itself would send b""."""
    answer = client.handler.async_result()
    client._call(Create(client.chroot + path, data, OPEN, 0), answer)
    answer.get(timeout=10)


def overwrite(client: Client, path: str, data: bytes | None) -> None:
    answer = client.handler.async_result()
    client._call(SetData(client.chroot + path, data, -1), answer)
    answer.get(timeout=10)


def owned(fleet: MemberFleet, queue: str) -> bool:
    return queue in fleet.owned()


def progress_of(fleet: MemberFleet) -> Counter[str]:
    """Return how many messages of each queue were started, 0 for one that was just claimed."""
    return Counter(queue for queue, _, _ in list(fleet.ledger))


def all_go_on(fleet: MemberFleet, but: str = "") -> None:
    """Wait until every healthy queue has made progress, on members that never ended."""
    before = progress_of(fleet)
    rest = [queue for queue in HEALTHY if queue != but]
    fleet.wait(
        lambda: all(progress_of(fleet)[queue] > before[queue] for queue in rest),
        "the other queues are processed",
    )
    assert [member.failure for member, _ in fleet.members] == [None, None]


def faults(fleet: MemberFleet) -> dict[str, str]:
    found: dict[str, str] = {}
    for member, _ in fleet.members:
        if member._ownership is not None:
            found.update({slot.queue: slot.fault for slot in member._ownership.slots.values()})
    return {queue: fault for queue, fault in found.items() if fault}


def test_new_hostile_queue_nodes_cost_themselves_only(fleet: MemberFleet, outsider: Client) -> None:
    """Such a queue is not processed and has a reason, or is one without progress."""
    for name, value in VALUES.items():
        create(outsider, LAYOUT.queue(name), value)
    fleet.wait(lambda: fleet.owned().keys() >= USABLE, "the usable queues have an owner")
    bad = VALUES.keys() - USABLE
    fleet.wait(lambda: faults(fleet).keys() == bad, "the queues have faults")
    for name, fault in faults(fleet).items():
        assert QueueNode.parse(outsider.get(LAYOUT.queue(name))[0]).fault == fault
    all_go_on(fleet)
    create(outsider, LAYOUT.queue("later"), b"")
    fleet.wait(lambda: owned(fleet, "later"), "a queue that came later has an owner")
    for name in bad:
        overwrite(outsider, LAYOUT.queue(name), b"{}")
    fleet.wait(lambda: bad <= fleet.owned().keys(), "the repaired queues have owners")


def test_an_overwritten_queue_node_costs_itself_only(fleet: MemberFleet, outsider: Client) -> None:
    """The other queues of its owner are processed; a seek repairs the queue itself."""
    for name, value in VALUES.items():
        overwrite(outsider, LAYOUT.queue(HEALTHY[0]), value)
        all_go_on(fleet, but=HEALTHY[0])
        if name not in USABLE:
            fleet.wait(lambda: HEALTHY[0] in faults(fleet), f"the queue has a fault: {name}")
            seek(outsider, LAYOUT, HEALTHY[0], 5)
        fleet.wait(lambda: owned(fleet, HEALTHY[0]), f"the queue has an owner again: {name}")


def test_an_owner_repairs_a_giant_value(fleet: MemberFleet, outsider: Client) -> None:
    """A value that still names the owner is repaired with the next checkpoint."""
    path = LAYOUT.queue(HEALTHY[0])
    owner = QueueNode.parse(outsider.get(path)[0]).owner
    outsider.set(path, QueueNode(owner=owner, extra=(("x", "x" * 900_000),)).encode())
    wait_until(lambda: len(outsider.get(path)[0]) < 1000, "the node is small again")
    assert QueueNode.parse(outsider.get(path)[0]).owner == owner


@pytest.mark.parametrize("acl", [NOBODY, READ_ONLY], ids=["nobody", "read-only"])
def test_a_protected_queue_node_costs_itself_only(
    fleet: MemberFleet, outsider: Client, acl: Any
) -> None:
    """Its owner gives the queue up with the reason, and takes it again when it is allowed."""
    outsider.set_acls(LAYOUT.queue(HEALTHY[0]), acl)
    fleet.wait(lambda: not owned(fleet, HEALTHY[0]), "the owner has given the queue up")
    fleet.wait(lambda: "NoAuthError" in faults(fleet).get(HEALTHY[0], ""), "the reason is known")
    all_go_on(fleet, but=HEALTHY[0])
    if acl is READ_ONLY:  # nobody may change the other one back
        outsider.set_acls(LAYOUT.queue(HEALTHY[0]), OPEN)
        fleet.wait(lambda: owned(fleet, HEALTHY[0]), "it has an owner again")


@pytest.mark.parametrize("acl", [NOBODY, READ_ONLY], ids=["nobody", "read-only"])
def test_a_protected_worker_node_ends_that_registration(
    fleet: MemberFleet, outsider: Client, acl: Any
) -> None:
    """The other worker gets the queues; a new registration would have a new node."""
    member, engine = fleet.members[0]
    outsider.set_acls(LAYOUT.worker(member.name), acl)
    if acl is READ_ONLY:  # it is noticed with the next write
        fleet.wait(lambda: len(engine.claims) > 0, "the worker has queues")
        create(outsider, LAYOUT.queue("one"), b"")
        create(outsider, LAYOUT.queue("two"), b"")
    fleet.wait(lambda: engine.expirations > 0, "the registration is over")
    member.stop()
    del fleet.members[0]
    fleet.join()
    fleet.wait(lambda: set(HEALTHY) <= set(fleet.owned()), "all queues have owners")
    all_go_on(fleet)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda client, path: client.set_acls(path, NOBODY),
        lambda client, path: client.set(path, b"[" * 5000),
        lambda client, path: overwrite(client, path, None),
        lambda client, path: client.set(path, b'{"queues": 5}'),
    ],
    ids=["protected", "deep", "null", "wrong type"],
)
def test_a_spoilt_assignment_releases_nothing(
    fleet: MemberFleet, outsider: Client, spoil: Callable[[Client, str], None]
) -> None:
    """The worker keeps its queues, and gets new ones once the node is replaced."""
    member, engine = fleet.members[0]
    fences = {claim.queue: claim.fence for claim in engine.claims.values()}
    path = LAYOUT.assignment(member.name)
    spoil(outsider, path)
    all_go_on(fleet)
    fleet.create_queues([f"more-{number}" for number in range(4)])
    fleet.wait(lambda: fleet.balanced(len(HEALTHY) + 4), "the new queues are shared, too")
    assert fences.items() <= {c.queue: c.fence for c in engine.claims.values()}.items()
    assert parse_assignment(outsider.get(path)[0]) == engine.claims.keys()


def test_a_queue_that_names_a_worker_wrongly_is_claimed(
    fleet: MemberFleet, outsider: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """After a session timeout it counts as free; until then nobody reads it again and again."""
    name = fleet.members[0][0].name
    requests: list[str] = []
    for member, _ in fleet.members:
        call = member._client._call

        def counted(request: Any, answer: Any, call: Any = call) -> Any:
            if getattr(request, "path", "").endswith("/bad"):
                requests.append(type(request).__name__)
            return call(request, answer)

        member._client._call = counted  # type: ignore[method-assign]
    create(outsider, LAYOUT.queue("bad"), QueueNode(last=7, owner=name).encode())
    create(outsider, LAYOUT.queue("bad2"), QueueNode(last=7, owner=name).encode())
    fleet.wait(lambda: owned(fleet, "bad") and owned(fleet, "bad2"), "they are claimed")
    assert len(requests) < 12
    all_go_on(fleet)


def test_a_worker_lists_its_queues_again(fleet: MemberFleet, outsider: Client) -> None:
    """Another program that empties a worker's node takes no queue from it."""
    member, engine = fleet.members[0]
    fences = {claim.queue: claim.fence for claim in engine.claims.values()}
    outsider.set(LAYOUT.worker(member.name), b"{}")

    def listed() -> bool:
        data = outsider.get(LAYOUT.worker(member.name))[0]
        return parse_assignment(data) == engine.claims.keys()

    fleet.wait(listed, "the node lists them again")
    assert {claim.queue: claim.fence for claim in engine.claims.values()} == fences


def test_a_node_without_a_session_gets_no_queues(fleet: MemberFleet, outsider: Client) -> None:
    """All queues have owners beside a persistent worker node, new queues too."""
    ghosts = [LAYOUT.worker(f"worker-99999999{number:02}") for number in range(5)]
    for ghost in ghosts:
        create(outsider, ghost, b'{"queues": ["queue-0"]}')
    fleet.create_queues([f"more-{number}" for number in range(4)])
    fleet.wait(lambda: fleet.balanced(len(HEALTHY) + 4), "the workers share all queues")
    for ghost in ghosts:
        assert not outsider.exists(ghost.replace("/workers/", "/assignments/"))


def test_a_worker_that_claims_nothing_loses_its_share(
    fleet: MemberFleet, outsider: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Its queues go to workers that claim what they are granted, and the log names it."""
    outsider.create(LAYOUT.worker("worker-9999999999"), b'{"queues": []}', ephemeral=True)
    fleet.create_queues([f"more-{number}" for number in range(6)])
    fleet.wait(lambda: len(fleet.owned()) == len(HEALTHY) + 6, "the workers share all queues")
    (record,) = [each for each in caplog.records if "worker-9999999999" in str(each.args)]
    assert record.levelname == "WARNING"


@pytest.mark.parametrize(
    "value",
    [
        b'{"queues": [], "draining": true}',
        b'{"queues": [], "filter": {"queues": ["none"], "exclude": []}}',
        b'{"queues": [], "holds": 9}',
        b'{"queues": [], "process": "x"}',
    ],
)
def test_an_idle_worker_repairs_its_node(
    coordinator_url: str, open_fleet: Callable[..., MemberFleet], outsider: Client, value: bytes
) -> None:
    """A node with the right queues and another wish would keep it idle, or end a pause early."""
    fleet = open_fleet(coordinator_url)
    paths = [LAYOUT.worker(fleet.join()[0].name) for _ in range(2)]
    fleet.wait(lambda: fleet.balanced(0), "all is settled")
    before = [outsider.get(path)[0] for path in paths]
    for path in paths:
        overwrite(outsider, path, value)
    fleet.wait(lambda: [outsider.get(path)[0] for path in paths] == before, "both are repaired")
    fleet.create_queues(HEALTHY)
    fleet.wait(lambda: fleet.balanced(len(HEALTHY)), "the queues are shared")


def test_a_foreign_name_is_no_obstacle(fleet: MemberFleet, outsider: Client) -> None:
    """Nodes of other tools below `workers` and `queues` are passed over."""
    with pytest.raises(NodeExistsError):
        create(outsider, LAYOUT.workers, b"")
    create(outsider, LAYOUT.workers + "/tool", None)
    create(outsider, LAYOUT.assignment("tool"), None)
    all_go_on(fleet)


def test_a_node_that_goes_back_is_noticed(
    fleet: MemberFleet, outsider: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a rollback of the servers: the queue is released and goes on under a new fence."""
    path = LAYOUT.queue(HEALTHY[0])

    def starts() -> list[tuple[int, int]]:
        return [(number, fence) for queue, number, fence in fleet.ledger if queue == HEALTHY[0]]

    fleet.wait(lambda: outsider.get(path)[1].version > 3, "its progress was recorded")
    data, stat = outsider.get(path)
    rollback = outsider.transaction()  # no worker may write while there is no node
    rollback.delete(path)
    rollback.create(path, data)
    rollback.commit()
    before = starts()
    fleet.wait(lambda: starts()[-1][1] > before[-1][1], "it is claimed again")
    assert sum(engine.undone_writes for _, engine in fleet.members) == 1
    (record,) = [each for each in caplog.records if "acknowledged" in each.getMessage()]
    assert record.levelname == "ERROR"
    assert isinstance(record.args, tuple)
    assert record.args[1] == HEALTHY[0]
    assert record.args[2] >= stat.version > record.args[3]  # type: ignore[operator]
    fences = [fence for _, fence in starts()]
    assert fences == sorted(fences)
    numbers = [number for number, _ in starts()]
    assert numbers == list(range(1, len(numbers) + 1))  # nothing repeated, nothing lost


@pytest.mark.parametrize("folder", ["workers", "queues", "assignments", "election"])
def test_a_protected_folder_stops_no_queue(
    fleet: MemberFleet, outsider: Client, folder: str
) -> None:
    """The leader stays, if it need not list candidates, and plans again when it may list."""
    leader = next(member for member, _ in fleet.members if member.leader.is_leader())
    path = f"{LAYOUT.root}/{folder}"
    before = outsider.get_acls(path)[0]
    outsider.set_acls(path, [make_acl("world", "anyone", admin=True, write=True, create=True)])
    all_go_on(fleet)
    outsider.create(LAYOUT.queue("new"), b"")
    all_go_on(fleet)
    assert leader.leader.is_leader()
    outsider.set_acls(path, before)
    fleet.wait(lambda: owned(fleet, "new"), "the new queue is assigned")


def test_a_candidate_without_a_session_is_ignored(
    coordinator_url: str,
    outsider: Client,
    caplog: pytest.LogCaptureFixture,
    open_fleet: Callable[..., MemberFleet],
) -> None:
    """It would be the first candidate for ever, and no worker could become the leader."""
    outsider.create(f"{LAYOUT.election}/candidate-0000000000", b"", makepath=True)
    fleet = open_fleet(coordinator_url)
    fleet.join()
    fleet.create_queues(HEALTHY)  # waits for a leader
    fleet.wait(lambda: fleet.balanced(len(HEALTHY)), "the queues are assigned")
    fleet.close()
    assert any("candidate-0000000000" in str(record.args) for record in caplog.records)
