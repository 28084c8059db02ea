"""Real workers on a real ZooKeeper, a stream that is split and merged, and a worker that dies.

The server is the project's own: moto moves records when a shard is split, and ends no shard.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from qdo.brokers.base import Outgoing
from qdo.coordination.znodes.queue_node import QueueNode
from tests.support.app_runs import AppRuns
from tests.support.aws.kinesis_server import KinesisStub, kinesis_stub
from tests.support.kinesis import kinesis_url
from tests.support.processes import Proc, descendants, paused, wait_until, whole_lines

APP = """
import os
import time

import qdo

app = qdo.App("streams", session_timeout_seconds=4.0)
out = os.open("out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@app.job(order=os.environ["ORDER"], checkpoint=os.environ.get("CHECKPOINT", "interval"))
def job(message, context):
    key, number = message.key, message.body["n"]
    line = f"{message.queue} {key} {number} {message.fence} {os.getpid()}\\n"
    os.write(out, line.encode())
    time.sleep(0.003)
"""
KEYS = 24
WAIT_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class JobStart:
    """One record written by a job at its start."""

    shard: str
    key: str
    number: int
    fence: int
    pid: int


class KinesisFleet(AppRuns):
    """Workers on one stream, and the records of their jobs."""

    def __init__(
        self, kinesis: KinesisStub, stream: str, coordinator: str, folder: Path, order: str
    ) -> None:
        super().__init__("streams", folder, coordinator, kinesis_url(kinesis.url, stream))
        self.kinesis = kinesis
        self.stream = stream
        self.order = order
        self._sent = itertools.count()
        self.sent = 0
        self.began = time.time()

    def begin(self, *options: str, **env: str) -> Proc:
        """Start one worker."""
        return self.start(APP, *options, ORDER=self.order, **env)

    def send(self, count: int) -> None:
        """Send so many messages of each key, numbered."""
        for _ in range(count):
            number = next(self._sent)
            body = b'{"n":%d}' % number
            self.broker.send_many([Outgoing(self.stream, body, f"key{key}") for key in range(KEYS)])
            self.sent = number + 1

    def lines(self) -> list[JobStart]:
        found = (line.split() for line in whole_lines(self.folder / "out"))
        return [JobStart(a, b, int(c), int(d), int(e)) for a, b, c, d, e in found]

    def done(self) -> int:
        """Return how many different messages were begun."""
        return len({(line.key, line.number) for line in self.lines()})

    def wait_for(self, count: int) -> None:
        wait_until(
            lambda: self.done() >= count, f"{count} messages, {self.done()} so far", WAIT_SECONDS
        )

    def nodes(self) -> dict[str, QueueNode]:
        """Return the queue nodes, none before the first worker has come."""
        path = self.layout.queues
        names = self.client.get_children(path) if self.client.exists(path) else []
        return {name: self.node(name) for name in names}

    def places(self) -> dict[str, int]:
        """Return the recorded positions."""
        begin = self.broker.positions.resume_after
        return {name: begin(node.last, node.position) for name, node in self.nodes().items()}

    def check_order(self) -> None:
        """Everything came; no key ever skips ahead; a claim repeats nothing; parents come first."""
        lines = self.lines()
        expected = {(f"key{key}", number) for key in range(KEYS) for number in range(self.sent)}
        assert {(line.key, line.number) for line in lines} == expected
        for key in range(KEYS):
            reached = -1
            for line in (line for line in lines if line.key == f"key{key}"):
                assert line.number <= reached + 1, f"{line} came after {reached}"
                reached = max(reached, line.number)
        claims = {(line.shard, line.fence) for line in lines}
        for claim in claims:
            under = [line for line in lines if (line.shard, line.fence) == claim]
            for key in {line.key for line in under}:
                numbers = [line.number for line in under if line.key == key]
                assert numbers == sorted(set(numbers)), f"{claim} repeats {key}"
        first = {line.shard: index for index, line in reversed(list(enumerate(lines)))}
        last = {line.shard: index for index, line in enumerate(lines)}
        for child in first:
            for parent in self.broker.catalog.parents(child):
                assert last.get(parent, -1) < first[child], f"{child} began before {parent} ended"


@pytest.fixture(params=["queue", "key"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stream(kinesis: KinesisStub, aws_stream: str) -> str:
    """A stream of four shards."""
    kinesis.make(aws_stream, 4)
    return aws_stream


@pytest.fixture
def own_kinesis() -> Iterator[KinesisStub]:
    """A server of the test's own, whose retention the test may change."""
    with kinesis_stub() as stub:
        yield stub


@pytest.fixture
def fleet(
    kinesis: KinesisStub, stream: str, zookeeper_url: str, tmp_path: Path, order: str
) -> Iterator[KinesisFleet]:
    fleet = KinesisFleet(kinesis, stream, zookeeper_url, tmp_path, order)
    yield fleet
    fleet.close()


def kill(worker: Proc) -> None:
    """End a worker and its children at once."""
    for pid in (worker.pid, *descendants(worker.pid)):
        os.kill(pid, signal.SIGKILL)
    worker.wait()


def test_a_stream_is_split_while_a_worker_is_killed(fleet: KinesisFleet) -> None:
    """Four shards become six, one of three workers dies: nothing is lost, each key is in order."""
    workers = [fleet.begin() for _ in range(3)]
    fleet.send(20)
    fleet.wait_for(10 * KEYS)
    fleet.kinesis.split(fleet.stream, "shardId-000000000000")
    fleet.kinesis.split(fleet.stream, "shardId-000000000002")
    fleet.send(20)
    victim = next(
        worker
        for worker in workers
        if {line.pid for line in fleet.lines()} & set(descendants(worker.pid))
    )
    kill(victim)
    fleet.send(20)
    fleet.wait_for(60 * KEYS)
    assert len({line.shard for line in fleet.lines()}) == 8
    fleet.check_order()

    def laid_to_rest() -> bool:
        found = fleet.nodes()
        over = {name for name, node in found.items() if node.position == "SHARD_END"}
        return over == {f"shardId-00000000000{n}" for n in (0, 2)} and all(
            found[name].deleted for name in over
        )

    wait_until(laid_to_rest, "the parents are finished and at rest", WAIT_SECONDS)
    for worker in workers:
        if worker is not victim:
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0, worker.output


@pytest.mark.parametrize("order", ["queue"], indirect=True)
def test_shards_are_split_and_merged_while_workers_come_and_go(fleet: KinesisFleet) -> None:
    """Whatever is discovered when, by whichever leader: children come after their parents."""
    sender = threading.Thread(target=lambda: fleet.send(60))
    sender.start()
    try:
        first = fleet.begin()
        fleet.wait_for(5 * KEYS)
        fleet.kinesis.split(fleet.stream, "shardId-000000000001")
        fleet.kinesis.merge(fleet.stream, "shardId-000000000002", "shardId-000000000003")
        second = fleet.begin()
        fleet.kinesis.split(fleet.stream, "shardId-000000000005")
        fleet.kinesis.merge(fleet.stream, "shardId-000000000000", "shardId-000000000004")
        first.send(signal.SIGTERM)
        assert first.wait() == 0, first.output
        third = fleet.begin()
        sender.join()
        fleet.wait_for(60 * KEYS)
    finally:
        sender.join()
    fleet.check_order()
    for worker in (second, third):
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output


@pytest.mark.parametrize("order", ["queue"], indirect=True)
def test_a_shard_is_read_by_its_owner_only(fleet: KinesisFleet) -> None:
    """However many workers there are, requests are those of one reader for each shard."""
    for _ in range(3):
        fleet.begin()
    fleet.send(5)
    fleet.wait_for(5 * KEYS)
    reads = {name: fleet.kinesis.reads(fleet.stream, name) for name in fleet.broker.catalog.names()}
    assert len(reads) == 4
    before = {name: len(found) for name, found in reads.items()}
    name = next(iter(before))
    wait_until(
        lambda: len(fleet.kinesis.reads(fleet.stream, name)) >= before[name] + 12, "twelve reads"
    )
    for shard in reads:
        times = [at for at, _ in fleet.kinesis.reads(fleet.stream, shard)][before[shard] :]
        assert len(times) > 5
        # Four a second, by one; each may be late, so that the next one seems to be early.
        assert times[-1] - times[0] > 0.9 * (len(times) - 1) / 4


@pytest.mark.parametrize("order", ["queue"], indirect=True)
def test_a_frozen_worker_moves_no_position_when_it_wakes(fleet: KinesisFleet) -> None:
    """Its shards have new owners by then: positions only grow, and the order of keys holds."""
    frozen = fleet.begin()
    fleet.send(10)
    fleet.wait_for(2 * KEYS)
    (child,) = descendants(frozen.pid)
    with paused(frozen.pid), paused(child, fleet.coordinator):
        other = fleet.begin()
        fleet.send(10)
        fleet.wait_for(20 * KEYS)
        before = fleet.places()
    frozen.wait_for_line("registered; session timeout", count=2)
    fleet.send(2)
    fleet.wait_for(22 * KEYS)
    after = fleet.places()
    assert all(after[name] >= place for name, place in before.items())
    fleet.check_order()
    for worker in (frozen, other):
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output


@pytest.mark.parametrize("order", ["queue"], indirect=True)
def test_children_of_expired_shards_begin_at_the_start(
    own_kinesis: KinesisStub, zookeeper_url: str, tmp_path: Path, order: str
) -> None:
    """Also where others begin with the newest: the app was there before, and was away for long."""
    own_kinesis.make("s", 1)
    fleet = KinesisFleet(own_kinesis, "s", zookeeper_url, tmp_path, order)
    options = {"QDO_BROKER": kinesis_url(own_kinesis.url, "s") + "&start=latest&trimmed=oldest"}
    try:
        worker = fleet.begin("--burst", **options)
        assert worker.wait(WAIT_SECONDS) == 0, worker.output
        own_kinesis.split("s", "shardId-000000000000")
        own_kinesis.set(retention_hours=0)
        assert "shardId-000000000000" not in own_kinesis.shards("s")
        own_kinesis.set(retention_hours=24)
        fleet.send(1)
        sent = time.time()
        wait_until(lambda: time.time() > sent + 6, "what was sent is older than a moment")
        worker = fleet.begin("--burst", **options)
        assert worker.wait(WAIT_SECONDS) == 0, worker.output
        assert fleet.done() == KEYS
    finally:
        fleet.close()


@pytest.mark.parametrize("order", ["queue"], indirect=True)
def test_a_burst_goes_on_through_children(fleet: KinesisFleet) -> None:
    """It ends when all shards are at their tips, also those that had to wait for their parents."""
    fleet.send(2)
    fleet.kinesis.split(fleet.stream, "shardId-000000000000")
    fleet.send(2)
    fleet.kinesis.merge(fleet.stream, "shardId-000000000005", "shardId-000000000001")
    fleet.send(2)
    worker = fleet.begin("--burst")
    assert worker.wait(WAIT_SECONDS) == 0, worker.output
    assert fleet.done() == 6 * KEYS
    fleet.check_order()
