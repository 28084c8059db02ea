"""Workers with filters: the queues they are granted, and the queues without an owner."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from qdo.app import App
from qdo.coordination.client import Client, connect
from qdo.coordination.member import Member
from qdo.coordination.protocol.ownership import MemberOptions
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import encode_queues
from qdo.ops.status import QueueStatus, queue_statuses
from qdo.ops.worker_status import worker_statuses
from qdo.queues import QueueFilter
from tests.support.coordinator_process import connected
from tests.support.fleet import CountingEngine
from tests.support.processes import Proc, wait_until

JOB = """
def write(message, context):
    with open(f"out-{message.queue}", "a") as file:
        file.write(f"{message.body}\\n")
"""
WORKER = "import sys; from qdo.cli.worker import main; sys.argv[0] = 'qdo-worker'; main()"


class FilteredFleet:
    """Real `qdo-worker` processes of one app, on files in a folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        (folder / "jobs.py").write_text(JOB)
        self.app = stack.enter_context(App("a", broker=f"sqlite:{folder}/qdo-data/messages.db"))
        self.layout = Layout.of("a")

    def start(self, *options: str) -> Proc:
        job = ("--app", "a", "--job", "jobs:write", "--session-timeout-seconds", "2")
        return self.stack.enter_context(Proc.python("-c", WORKER, *job, *options, cwd=self.folder))

    def client(self) -> Client:
        client = connect(f"sqlite:{self.folder}/qdo-data/coordination.db")
        self.stack.enter_context(closing(client))
        client.open(20)
        self.stack.callback(client.stop)
        return client

    def statuses(self, client: Client) -> dict[str, QueueStatus]:
        found = queue_statuses(client, self.layout, self.app.broker).queues
        return {each.queue: each for each in found}

    def done(self, queue: str) -> list[str]:
        path = self.folder / f"out-{queue}"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FilteredFleet]:
    (tmp_path / "qdo-data").mkdir()
    with ExitStack() as stack:
        yield FilteredFleet(tmp_path, stack)


def test_workers_get_what_they_take_and_the_rest_is_nobodys(fleet: FilteredFleet) -> None:
    """The log and `qdo queues` name unmatched queues, until a worker takes them."""
    names = ["mail-1", "mail-2", "mail-vip", "sms-1", "fax-1"]
    fleet.app.send_many([(name, n) for name in names for n in range(3)])
    mail = fleet.start("--queues", "mail-*", "--exclude", "*-vip")
    client = fleet.client()
    wait_until(lambda: fleet.done("mail-2") == ["0", "1", "2"], "its queues are processed")
    mail.wait_for_line(r"rebalancer: no worker takes 3 queues .*: fax-1, mail-vip, sms-1$")
    statuses = fleet.statuses(client)
    assert {name for name, each in statuses.items() if each.untaken} == {
        "mail-vip",
        "sms-1",
        "fax-1",
    }
    shown = Proc.python("-m", "qdo", "queues", "--app", "a", cwd=fleet.folder)
    with shown:
        assert shown.wait() == 0
        assert [line.split()[:6] for line in shown.output.splitlines() if "fax" in line] == [
            ["fax-1", "no-worker", "excluded", "by", "all", "workers"]
        ]
    [worker] = worker_statuses(client, fleet.layout)
    assert worker.takes == QueueFilter(("mail-*",), ("*-vip",))
    rest = fleet.start("--queues", "sms-*", "--queues", "mail-vip")
    wait_until(
        lambda: [fleet.done(name) for name in ("sms-1", "mail-vip")] == [["0", "1", "2"]] * 2,
        "the other worker's queues",
    )
    assert fleet.done("fax-1") == []
    statuses = fleet.statuses(client)
    assert {name for name, each in statuses.items() if each.untaken} == {"fax-1"}
    assert statuses["mail-1"].owner == statuses["mail-2"].owner
    assert statuses["sms-1"].owner == statuses["mail-vip"].owner != statuses["mail-1"].owner
    with Proc.python("-m", "qdo", "workers", "--app", "a", cwd=fleet.folder) as table:
        assert table.wait() == 0
        assert "--queues mail-* --exclude *-vip" in table.output
    fleet.start()
    wait_until(lambda: fleet.done("fax-1") == ["0", "1", "2"], "the queue that no worker took")
    for proc in (mail, rest):
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_burst_ends_when_the_queues_it_takes_are_done(fleet: FilteredFleet) -> None:
    """Queues that it leaves to other workers do not keep it running."""
    fleet.app.send_many([("mail-1", 1), ("sms-1", 1)])
    burst = fleet.start("--queues", "mail-*", "--burst")
    assert burst.wait() == 0, burst.output
    assert fleet.done("mail-1") == ["1"]
    assert fleet.done("sms-1") == []
    nothing = fleet.start("--queues", "none-*", "--burst")
    assert nothing.wait() == 0, nothing.output


def test_filters_come_from_the_environment_too(fleet: FilteredFleet) -> None:
    """Several in one variable, separated by commas."""
    fleet.app.send_many([("mail-1", 1), ("sms-1", 1), ("fax-1", 1)])
    env = {"QDO_QUEUES": "mail-*,sms-*", "QDO_EXCLUDE": "sms-*", "QDO_BURST": "true"}
    argv = ("-m", "qdo.cli.worker", "--app", "a", "--job", "jobs:write")
    with Proc.python(*argv, env=env, cwd=fleet.folder) as proc:
        assert proc.wait() == 0, proc.output
    assert [fleet.done(name) for name in ("mail-1", "sms-1", "fax-1")] == [["1"], [], []]


@pytest.fixture
def member(tmp_path: Path) -> Iterator[tuple[Member, CountingEngine, Client]]:
    """A worker that takes queues of one kind, on its own, and a client that looks on."""
    url = f"sqlite:{tmp_path / 'c.db'}"
    engine = CountingEngine([])
    client = connect(url, session_timeout_seconds=4.0)
    options = MemberOptions(filter=QueueFilter(("a*",)))
    layout = Layout.of("fleet")
    made = Member(client, layout, engine, component={"host": "test"}, options=options)
    engine.member = made
    made.start()
    with connected(url) as onlooker:
        yield made, engine, onlooker
    made.stop()
    assert made.failure is None


def test_the_worker_node_shows_its_filters_throughout(
    member: tuple[Member, CountingEngine, Client],
) -> None:
    """Every write of the node keeps the filter."""
    made, engine, client = member
    layout = Layout.of("fleet")

    def node() -> dict[str, object]:
        return dict(json.loads(client.get(layout.worker(made.name))[0]))

    filters = {"queues": ["a*"], "exclude": []}
    assert node() == {"queues": [], "filter": filters}
    wait_until(made.leader.is_leader, "it leads")
    made.leader.create_queues(["a1", "b1"])
    wait_until(lambda: set(engine.claims) == {"a1"}, "its queue")
    wait_until(lambda: node() == {"queues": ["a1"], "filter": filters}, "the node")
    made.drain()
    assert made.wait_released(20.0)
    assert node() == {"queues": [], "draining": True, "filter": filters}


def test_what_is_granted_and_not_taken_is_not_claimed(
    member: tuple[Member, CountingEngine, Client],
) -> None:
    """A rebalancer of an older version knows no filters, and grants too much."""
    made, engine, client = member
    layout = Layout.of("fleet")
    wait_until(made.leader.is_leader, "it leads")
    made.leader.create_queues(["a1", "b1"])
    wait_until(lambda: set(engine.claims) == {"a1"}, "its queue")
    made.leader.create_queues(["a2"])
    wait_until(lambda: set(engine.claims) == {"a1", "a2"}, "both")
    path = layout.assignment(made.name)
    client.set(path, encode_queues(["a1", "b1"]))
    wait_until(
        lambda: set(json.loads(client.get(path)[0])["queues"]) == {"a1", "a2"}, "the leader's own"
    )
    wait_until(lambda: made.settled() and set(engine.claims) == {"a1", "a2"}, "both again")
    assert json.loads(client.get(layout.queue("b1"))[0]) == {"last": ""}
