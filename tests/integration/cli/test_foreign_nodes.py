"""Commands on nodes that other programs left: an exit code and a reason, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from kazoo.protocol.serialization import Create
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

from qdo import App
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.fleet.settings_machine import SettingsNode
from qdo.positions import position_now
from tests.support.cli import Ended, run_here
from tests.support.coordinator_process import connected
from tests.support.fakes.hostile_content import VALUES, hostile_values, many_hostile, one_hostile

Run = Callable[..., Ended]
LAYOUT = Layout.of("a")
COORDINATORS = ("embedded", "zookeeper", "database")
NOBODY = [make_acl("digest", "nobody:AAAAAAAAAAAAAAAAAAAAAAAAAAA=", all=True)]
COMPONENTS = (
    None,
    b"[" * 5000,
    b'{"started": NaN}',
    b'{"started": 1e18, "behind": {"good": 1e300, "null": -5}, "faults": {"good": [1]}}',
    b'{"started": 1e999}',
    b'{"started": "soon", "host": ["\\ud800"], "pid": {}, "behind": 5, "faults": 5}',
    b"[1]",
)


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str],
    coordinator_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Returns a function that runs `qdo` and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDO_COORDINATOR", coordinator_url)

    def call(name: str, *arguments: str) -> Ended:
        ended = run_here(capsys, *name.split(), "--app", "a", *arguments)
        ended.out.encode()
        assert "Traceback" not in ended.err
        return ended

    return call


def create(client: Client, path: str, data: bytes | None, ephemeral: bool = False) -> None:
    answer = client.handler.async_result()
    client._call(
        Create(path and client.chroot + path, data, OPEN_ACL_UNSAFE, int(ephemeral)), answer
    )
    answer.get(timeout=10)


@pytest.fixture
def client(cli: Run, coordinator_url: str) -> Iterator[Client]:
    """A coordinator with one bad node of each kind beside a healthy queue."""
    with connected(coordinator_url) as client:
        for path in (*LAYOUT.persistent, f"{LAYOUT.components}/worker"):
            client.ensure_path(path)
        last = position_now()
        create(client, LAYOUT.queue("good"), QueueNode(last=last).encode())
        create(client, LAYOUT.queue("null"), None)
        create(client, LAYOUT.queue("giant"), b'{"x": "' + b"x" * 900_000 + b'"}')
        create(client, LAYOUT.queue("deep"), b"[" * 5000)
        create(client, LAYOUT.queue("large"), b'{"last": "9223372036854775807"}')
        create(client, LAYOUT.queue("ahead"), QueueNode(last=last + 10**16).encode())
        create(client, LAYOUT.queue("secret"), QueueNode(last=last).encode())
        client.set_acls(LAYOUT.queue("secret"), NOBODY)
        for number, data in enumerate(COMPONENTS):
            create(client, f"{LAYOUT.components}/worker/host-{number}", data, ephemeral=True)
        for number in range(3):
            create(client, LAYOUT.worker(f"worker-000000000{number}"), None, ephemeral=number < 2)
        client.set_acls(LAYOUT.worker("worker-0000000001"), NOBODY)
        create(client, LAYOUT.assignment("worker-0000000000"), None)
        with App("a") as app:
            app.send_many([(name, 1) for name in ("good", "null", "ahead", "secret")])
        yield client


def test_queues_shows_each_with_its_reason(cli: Run, client: Client) -> None:
    """One that cannot be read hides no other."""
    items = {item["queue"]: item for item in cli("queues", "-o", "json").items()}
    assert {name for name, item in items.items() if item["fault"]} == {
        "giant",
        "deep",
        "large",
        "ahead",
        "secret",
    } | ({"good"} if items["good"]["fault"] else set())
    assert "NoAuthError" in items["secret"]["fault"]
    assert "future" in items["ahead"]["fault"]
    assert items["null"]["backlog"] == 1
    assert cli("queues").code == 0


@pytest.mark.parametrize(
    ("folder", "missing"),
    [
        (LAYOUT.queues, "the list of queues in the coordinator"),
        (LAYOUT.workers, "the list of workers"),
        (f"{LAYOUT.components}/worker", "the reports of workers"),
    ],
)
def test_queues_shows_the_rest_beside_a_protected_folder(
    cli: Run, client: Client, folder: str, missing: str
) -> None:
    """What cannot be read is named with its path, and the exit code says that it is partial."""
    client.set(LAYOUT.queue("good"), QueueNode(last=5, owner="worker-0000000000").encode())
    client.set_acls(folder, NOBODY)
    ended = cli("queues", "-o", "json")
    items = {item["queue"]: item for item in ended.items(4)}
    assert folder in ended.err
    assert missing in ended.err
    assert (items["good"]["last"], items["good"]["backlog"]) == ("5", 1)
    assert items["good"]["owner_gone"] is (None if folder == LAYOUT.workers else False)
    # Only the coordinator has this queue.
    assert ("deep" in items) is (folder != LAYOUT.queues)
    assert cli("queues").code == 4


def test_queues_is_rejected_if_nothing_can_be_read(cli: Run, client: Client) -> None:
    """As for the account of another app."""
    for folder in (LAYOUT.queues, LAYOUT.workers, f"{LAYOUT.components}/worker"):
        client.set_acls(folder, NOBODY)
    ended = cli("queues")
    assert ended.code == 5
    assert LAYOUT.queues in ended.err


def test_queues_names_a_worker_that_claims_nothing(cli: Run, client: Client) -> None:
    """A foreign node gets queues until the rebalancer notices; a worker has a process."""
    session = client.client_id[0]
    process = f"{LAYOUT.components}/worker/host-0"
    assert client.get(process)[1].ephemeralOwner == session
    name = "worker-0000000000"
    assigned = json.dumps({"queues": ["good", "null", "deep"]}).encode()
    client.set(LAYOUT.assignment(name), assigned)

    def reasons() -> dict[str, str | None]:
        items = cli("queues", "-o", "json").items()
        return {item["queue"]: item["unclaimed"] for item in items}

    found = reasons()
    assert found["good"] == found["null"] == f"assigned to {name}, not claimed yet"
    assert found["deep"] is found["ahead"] is None  # one has a fault, the other is not assigned
    for each in client.get_children(f"{LAYOUT.components}/worker"):
        client.delete(f"{LAYOUT.components}/worker/{each}")
    found = reasons()
    assert found["null"] is not None
    assert found["null"].startswith(f"assigned to {name}")
    assert found["null"] != f"assigned to {name}, not claimed yet"
    assert found["null"] in cli("queues").out
    client.set(LAYOUT.queue("null"), QueueNode(owner=name).encode())
    assert reasons()["null"] is None


def test_workers_names_those_that_get_no_queues(cli: Run, client: Client) -> None:
    """A node without a session is not a worker, and a protected one gets no queues."""
    faults = {item["worker"]: item["fault"] for item in cli("workers", "-o", "json").items()}
    assert faults["worker-0000000000"] is None
    assert "NoAuthError" in faults["worker-0000000001"]
    assert "no session" in faults["worker-0000000002"]
    ended = cli("workers")
    assert ended.code == 0
    assert "FAULT" in ended.out


def test_tree_shows_the_rest(cli: Run, client: Client) -> None:
    """Folders that cannot be listed, too."""
    client.set_acls(LAYOUT.assignments, NOBODY)
    values = {item["path"]: item["value"] for item in cli("admin tree", "-o", "json").items()}
    assert "NoAuthError" in values[LAYOUT.queue("secret")]
    assert values[LAYOUT.queue("null")] == ""
    assert cli("admin tree").code == 0


def test_seek_repairs(cli: Run, client: Client) -> None:
    """A plan works on every node, and its execution leaves a readable one."""
    for queue in ("null", "giant", "deep", "large", "ahead"):
        if queue != "ahead":  # unreadable nodes have no failing message
            assert cli("retry-now", queue).code == 5, queue
        with App("a") as app:
            app.send(queue, 2)
        assert cli("seek", queue, "earliest", "--dry-run").code == 0, queue
        assert cli("seek", queue, "earliest", "--yes").code == 0, queue
        assert QueueNode.parse(client.get(LAYOUT.queue(queue))[0]).fault is None, queue


def test_a_protected_queue_is_named(cli: Run, client: Client) -> None:
    """Commands that would write it fail with the path and the remedy."""
    for arguments in (
        ("seek", "secret", "earliest", "--yes"),
        ("retry-now", "secret"),
    ):
        ended = cli(*arguments)
        assert ended.code == 5
        assert LAYOUT.queue("secret") in ended.err


@pytest.mark.parametrize("coordinator_url", ["embedded"], indirect=True)
def test_a_name_that_is_no_name_is_refused(cli: Run, client: Client) -> None:
    """It must not lead to another node."""
    for queue in ("../queues", ".", "a/b", "a\x1b", "\udc80"):
        for name, *options in (("seek", "earliest"), ("retry-now",), ("delete", "--yes")):
            assert cli(name, queue, *options).code == 2, (name, queue)


WORKER = "worker-0000000000"
READING = (
    ("queues",),
    ("workers", WORKER),
    ("doctor",),
    ("pause", "--list"),
    ("settings show",),
    ("settings get",),
    ("settings history",),
    ("settings diff",),
    ("move", "--plan"),
)
"""Commands that read the nodes of which there is one."""
READING_MANY = (
    ("audit",),
    ("audit", "-o", "json"),
    ("limits list",),
    ("limits list", "-o", "json"),
    ("documents list", "plans"),
    ("documents list", "plans", "-o", "json"),
    ("locks",),
    ("locks", "-o", "json"),
    ("queues", "-o", "csv"),
    ("check",),
    ("ps", "--timeout", "0.1s"),
    ("admin tree",),
    ("admin checkpoints export", "--file", "saved.jsonl"),
)


def put(client: Client, nodes: dict[str, bytes]) -> None:
    """Write nodes, whether they exist or not."""
    for path, data in nodes.items():
        if client.exists(path) is None:
            client.create(path, data, makepath=True)
        else:
            client.set(path, data)


@pytest.fixture
def hostile(cli: Run, coordinator_url: str) -> Iterator[Client]:
    """A coordinator with nodes that are valid in form, and hostile in content."""
    with connected(coordinator_url) as client:
        for path in (*LAYOUT.persistent, f"{LAYOUT.components}/worker"):
            client.ensure_path(path)
        client.create(LAYOUT.worker(WORKER), b"{}", ephemeral=True)
        client.create(f"{LAYOUT.components}/worker/host-0", b"{}", ephemeral=True)
        with App("a") as app:
            app.send("good", 1)
        yield client


@pytest.mark.long("hundreds of commands")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("coordinator_url", "name"),
    list(zip(cycle(COORDINATORS), VALUES, strict=False)),
    indirect=["coordinator_url"],
)
def test_hostile_content_ends_no_command(cli: Run, hostile: Client, name: str) -> None:
    """Commands show it or refuse it with a reason, and can replace it."""
    Path("live.toml").write_text("fetch = 6")
    put(hostile, one_hostile(LAYOUT, WORKER, name))
    put(hostile, {f"{LAYOUT.components}/worker/host-0": hostile_values("component")[name]})
    for arguments in READING:
        assert cli(*arguments).code in (0, 1, 4, 5), arguments
    assert cli("settings apply", "live.toml", "--force").code == 0
    assert cli("resume", "--all", "--yes").code == 0
    (item,) = cli("settings show", "-o", "json").items()
    assert item["value"] == 6


@pytest.mark.long("hundreds of commands")
@pytest.mark.slow
def test_many_hostile_nodes_end_no_command(cli: Run, hostile: Client) -> None:
    *_, current = hostile_values("component").values()  # of a worker that knows limits
    put(hostile, {f"{LAYOUT.components}/worker/host-0": current})
    put(hostile, many_hostile(LAYOUT, WORKER))
    for arguments in READING_MANY:
        assert cli(*arguments).code in (0, 1, 2, 4, 5), arguments
    for limit in hostile.get_children(LAYOUT.fleet.limits):
        assert cli("limits set", limit, "--max", "1", "--rate", "none").code == 0
    for name in hostile.get_children(LAYOUT.fleet.document_set("plans")):
        assert cli("documents get", "plans", name).code == 0
        assert cli("documents put", "plans", name, "1").code == 0


def test_a_value_that_grows_when_written_is_replaced(cli: Run, hostile: Client) -> None:
    """A request with the keys of the other program would end the connection."""
    hostile.delete(f"{LAYOUT.components}/worker/host-0")
    hostile.create(
        LAYOUT.fleet.limit("crm"), b'{"x": [' + b"1e15," * 60_000 + b"0]}", makepath=True
    )
    assert cli("limits set", "crm", "--max", "3").code == 0
    (item,) = cli("limits list", "-o", "json").items()
    assert (item["max"], item["fault"]) == (3, None)


def test_a_lower_number_of_live_settings_holds_no_change_up(cli: Run, hostile: Client) -> None:
    """An older node was written back by hand, and later versions are kept."""
    hostile.delete(LAYOUT.worker(WORKER))
    for number in range(1, 4):
        assert cli("settings set", "fetch", str(number)).code == 0
    hostile.set(LAYOUT.fleet.settings, b"")
    assert cli("settings set", "fetch", "7").code == 0
    current = SettingsNode.parse(hostile.get(LAYOUT.fleet.settings)[0]).current
    assert current is not None
    older = SettingsNode(replace(current, number=2))
    hostile.set(LAYOUT.fleet.settings, older.encode())
    (item,) = cli("settings set", "fetch", "8", "-o", "json").items()
    assert item["version"] == 5
