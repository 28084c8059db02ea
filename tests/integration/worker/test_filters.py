"""Workers with filters: the queues they are granted, and the queues without an owner."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.coordination.client import Client, connect
from qdo.coordination.member import Member
from qdo.coordination.protocol.ownership import MemberOptions
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.worker_node import encode_queues
from qdo.ops.status import QueueStatus, queue_statuses
from qdo.ops.worker_status import worker_statuses
from qdo.queues import QueueFilter
from tests.support.app_runs import OperatorDesk
from tests.support.coordinator_process import connected
from tests.support.fleet import CountingEngine
from tests.support.processes import wait_until


def statuses(desk: OperatorDesk) -> dict[str, QueueStatus]:
    found = queue_statuses(desk.client, desk.layout, desk.broker).queues
    return {each.queue: each for each in found}


def untaken(desk: OperatorDesk) -> set[str]:
    return {name for name, each in statuses(desk).items() if each.untaken}


def test_workers_get_what_they_take_and_the_rest_is_nobodys(local: OperatorDesk) -> None:
    """The log and `qdo queues` name unmatched queues, until a worker takes them."""
    names = ["mail-1", "mail-2", "mail-vip", "sms-1", "fax-1"]
    local.app.send_many([(name, n) for name in names for n in range(3)])
    mail = local.work("--queues", "mail-*", "--exclude", "*-vip")
    mail.wait_for_line(r"rebalancer: no worker takes 3 queues .*: fax-1, mail-vip, sms-1$")
    for queue in ("mail-1", "mail-2"):
        local.wait_for(0, 1, 2, queue=queue)
    assert untaken(local) == {"mail-vip", "sms-1", "fax-1"}
    shown = local.qdo("queues").out.splitlines()
    assert [line.split()[:6] for line in shown if "fax" in line] == [
        ["fax-1", "no-worker", "excluded", "by", "all", "workers"]
    ]
    [worker] = worker_statuses(local.client, local.layout)
    assert worker.takes == QueueFilter(("mail-*",), ("*-vip",))
    rest = local.work("--queues", "sms-*", "--queues", "mail-vip")
    for queue in ("sms-1", "mail-vip"):
        local.wait_for(0, 1, 2, queue=queue)
    assert local.bodies("fax-1") == []
    assert untaken(local) == {"fax-1"}
    found = statuses(local)
    assert found["mail-1"].owner == found["mail-2"].owner
    assert found["sms-1"].owner == found["mail-vip"].owner != found["mail-1"].owner
    assert "--queues mail-* --exclude *-vip" in local.qdo("workers").out
    local.work()
    local.wait_for(0, 1, 2, queue="fax-1")
    assert all(local.bodies(name) == ["0", "1", "2"] for name in names)
    for proc in (mail, rest):
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0


def test_burst_ends_when_the_queues_it_takes_are_done(local: OperatorDesk) -> None:
    """Queues that it leaves to other workers, or has no job for, do not keep it running."""
    local.app.send_many([("mail-1", 1), ("sms-1", 1)])
    for options in (("--queues", "mail-*"), ("--queues", "none-*"), ()):
        burst = local.work(*options, "--burst", queues="*" if options else "mail-*")
        assert burst.wait() == 0, burst.output
    assert (local.bodies("mail-1"), local.bodies("sms-1")) == (["1"], [])


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
