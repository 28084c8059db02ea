"""`qdo` on a Kinesis stream, and its errors: one line, a documented exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.positions import position_of_time
from tests.support.aws.fault_proxy import Proxy
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.cli import WORKER, Ended, command, run_in
from tests.support.coordinator_process import connected
from tests.support.kinesis import kinesis_url, opened

SHARD = "shardId-000000000000"
OTHER = "shardId-000000000001"
OLD = position_of_time(1_400_000_000.0)
WORK = ("--app", "a", "--job", "qdo.programs.echo:job", "--burst", "--log-level", "warning")
Run = Callable[..., Ended]


@pytest.fixture
def proxy(kinesis_proxy: Proxy) -> Proxy:
    return kinesis_proxy


@pytest.fixture
def stream(kinesis: KinesisStub, aws_stream: str) -> str:
    """A stream of two shards."""
    kinesis.make(aws_stream, 2)
    return aws_stream


@pytest.fixture
def qdo(proxy: Proxy, stream: str, tmp_path: Path) -> Run:
    """Run `qdo` on this test's stream."""

    def call(*arguments: str, options: str = "") -> Ended:
        url = kinesis_url(proxy.url, stream, options)
        return run_in(tmp_path, *arguments, env={"QDO_APP": "a", "QDO_BROKER": url})

    return call


@pytest.fixture
def work(proxy: Proxy, stream: str, tmp_path: Path) -> Run:
    """Run a worker until all is done; its lines are ids and bodies."""

    def call(*options: str) -> Ended:
        url = kinesis_url(proxy.url, stream)
        ended = command(*WORKER, *WORK, "--broker", url, *options, cwd=tmp_path)
        assert ended.code == 0, ended.err
        return ended

    return call


def sent(proxy: Proxy, stream: str) -> list[tuple[Any, str | None, str | None]]:
    """Return body, key and headers of all messages in the stream."""
    broker = opened(proxy.url, stream)
    try:
        found = [
            row for shard in broker.catalog.names() for row in broker.reader(shard, 0).fetch(1000)
        ]
        return [(json.loads(row[1]), row[2], row[3]) for row in found]
    finally:
        broker.close()


# --- sending ------------------------------------------------------------------------


def test_sending(qdo: Run, proxy: Proxy, stream: str) -> None:
    """To the stream by key, or to a shard; it prints the sequence number."""
    by_key = qdo("send", stream, '{"n": 1}', "--key", "k", "--header", "x=y")
    to_shard = qdo("send", OTHER, "2")
    assert [by_key.code, to_shard.code] == [0, 0], by_key.err + to_shard.err
    assert int(to_shard.out) > int(by_key.out) > 10**50
    assert sorted(sent(proxy, stream), key=str) == [
        (2, None, None),
        ({"n": 1}, "k", '{"x":"y"}'),
    ]


def test_a_file_is_sent_in_the_order_of_its_keys(
    qdo: Run, proxy: Proxy, stream: str, tmp_path: Path
) -> None:
    """Keys come from a field of each line."""
    lines = [{"who": f"w{number % 5}", "n": number} for number in range(50)]
    (tmp_path / "lines").write_text("".join(json.dumps(each) + "\n" for each in lines))
    ended = qdo("send", stream, "--file", "lines", "--key-field", "who")
    assert (ended.code, ended.err) == (0, "sent 50 messages\n")
    found = sent(proxy, stream)
    assert len(found) == 50
    for who in range(5):
        mine = [body["n"] for body, key, _ in found if key == f"w{who}"]
        assert mine == list(range(who, 50, 5))


@pytest.mark.parametrize(
    ("arguments", "fault", "code", "words"),
    [
        (["shardId-000000000009", "1"], "", 2, "'shardId-000000000009'"),
        ([SHARD, "1", "--delay", "5"], "", 5, "kinesis"),
        ([SHARD, "1", "--key", "\udcff"], "", 2, "UTF-8"),
        ([SHARD, "1"], "denied", 5, "kinesis:PutRecords"),
    ],
)
def test_what_cannot_be_sent(
    qdo: Run, proxy: Proxy, arguments: list[str], fault: str, code: int, words: str
) -> None:
    """An error of the broker is one line, and has the exit code of its class."""
    if fault:
        proxy.spoil(fault, "PutRecords", count=0)
    assert words in qdo("send", *arguments).refusal(code)


# --- looking and seeking ------------------------------------------------------------


def test_looking_and_seeking(qdo: Run, work: Run) -> None:
    """A shard is seen with its age, sent back to a sequence number, and done to its end."""
    ids = [qdo("send", SHARD, str(number)).out.strip() for number in range(3)]
    assert len(work().out.splitlines()) == 3
    (item,) = qdo("queues", SHARD, "-o", "json").items()
    assert (item["position"], item["backlog"]) == (ids[2], None)
    assert item["behind_seconds"] < 1  # since Kinesis answered with no records
    assert qdo("seek", SHARD, ids[0], "--yes").code == 0
    (item,) = qdo("queues", SHARD, "-o", "json").items()
    assert item["position"] == ids[0]
    assert item["behind_seconds"] > 1  # the age of the second message
    assert len(work().out.splitlines()) == 2
    assert qdo("seek", SHARD, "earliest", "--yes").code == 0
    assert len(work().out.splitlines()) == 3


def test_peeking_cancelling_and_purging(qdo: Run, work: Run) -> None:
    """By sequence numbers, without a delay; a worker passes what was cancelled."""

    def worked() -> list[str]:
        return [line.split()[-1] for line in work().out.splitlines()]

    def looked(*arguments: str) -> list[dict[str, Any]]:
        return qdo(*arguments, "-o", "json").items()

    qdo("send", SHARD, "0")
    assert worked() == ["0"]
    ids = [qdo("send", SHARD, str(number)).out.strip() for number in range(1, 4)]
    found = looked("peek", SHARD, "--body")
    assert [(each["id"], each["body"]) for each in found] == list(zip(ids, (1, 2, 3), strict=True))
    assert [each["outcome"] for each in looked("cancel", "--yes", SHARD, ids[1])] == ["cancelled"]
    assert [each["id"] for each in looked("peek", SHARD)] == [ids[0], ids[2]]
    assert worked() == ["1", "3"]
    qdo("send", SHARD, "4")
    assert [each["waiting"] for each in looked("purge", "--yes", SHARD)] == [None]
    assert worked() == []
    qdo("send", SHARD, "5")
    assert worked() == ["5"]


def test_a_seek_needs_no_message(qdo: Run, work: Run, proxy: Proxy) -> None:
    """It is the way past messages that cannot be read."""
    qdo("send", SHARD, "1")
    work()
    proxy.spoil("denied", "GetRecords", count=0)
    ended = qdo("seek", SHARD, "latest", "--yes", "-o", "json")
    (item,) = ended.items()
    assert (item["executed"], item["behind_before"], item["behind_after"]) == (True, None, None)


def test_a_child_is_seen_to_wait(qdo: Run, work: Run, kinesis: KinesisStub, stream: str) -> None:
    """For its parent, also where the parent itself is not asked about."""
    work()
    kinesis.split(stream, SHARD)
    child = "shardId-000000000002"
    (item,) = qdo("queues", child, "-o", "json").items()
    assert item["waits_for"] == [SHARD]
    assert f"waits for {SHARD}" in qdo("queues", child).out


def test_a_recreated_stream_reuses_names_of_finished_shards(
    qdo: Run, work: Run, kinesis: KinesisStub, stream: str
) -> None:
    """They are not skipped silently: the worker and `qdo queues` report them; a seek helps."""
    kinesis.split(stream, SHARD)
    work()
    assert SHARD not in qdo("queues").out.split()
    kinesis.client.delete_stream(StreamName=stream)
    kinesis.make(stream, 1)
    qdo("send", SHARD, "1")
    only = ("--queues", SHARD)  # the others are gone
    ended = work(*only)
    assert ended.out == ""
    assert f"qdo seek {SHARD} earliest --yes" in ended.err
    (item,) = qdo("queues", SHARD, "-o", "json").items()
    assert item["fault"] is not None
    assert qdo("seek", SHARD, "earliest", "--yes").code == 0
    assert work(*only).out.endswith(" 1\n")
    (item,) = qdo("queues", SHARD, "-o", "json").items()
    assert item["fault"] is None


def test_a_shard_without_its_position_is_named(qdo: Run, work: Run, tmp_path: Path) -> None:
    """It stopped, and does not merely look slow; the other shards do not."""
    for shard in (SHARD, OTHER):
        qdo("send", shard, "1")
    work()
    with connected(f"sqlite:{tmp_path}/qdo-data/coordination.db") as client:
        client.set(Layout.of("a").queue(SHARD), QueueNode(last=OLD, position="7").encode())
    items = {each["queue"]: each for each in qdo("queues", "-o", "json").items()}
    assert f"qdo seek {SHARD} earliest --yes" in items[SHARD]["fault"]
    assert items[OTHER]["fault"] is None
    shown = qdo("queues", "-o", "json", options="trimmed=oldest")
    assert [each["fault"] for each in shown.items()] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["throttle", "unanswered"])
def test_one_unreadable_shard_hides_no_other(
    qdo: Run, proxy: Proxy, stream: str, fault: str
) -> None:
    """Nor does it hold up the list for long: it is asked for a few times only."""
    proxy.spoil(fault, "GetShardIterator", name=SHARD, count=0, seconds=11)
    items = {each["queue"]: each for each in qdo("queues", "-o", "json").items(4)}
    assert len(proxy.log("GetShardIterator")) <= 6  # of both shards
    assert items[SHARD]["error"] is not None
    assert items[OTHER]["error"] is None


@pytest.mark.parametrize("place", ["1" + 56 * "0", "SHARD_END"])
def test_what_lies_ahead_is_no_place_to_go_to(qdo: Run, work: Run, place: str) -> None:
    """Messages sent from then on would never run; it is known without reading the whole shard."""
    for number in range(3):
        qdo("send", SHARD, str(number))
    ended = work()
    assert "never run" in qdo("seek", SHARD, place, "--yes").refusal(2)
    (item,) = qdo("queues", SHARD, "-o", "json").items()
    assert item["position"] == ended.out.splitlines()[-1].split()[0]


def test_a_closed_shard_may_be_given_up(
    qdo: Run, work: Run, kinesis: KinesisStub, stream: str
) -> None:
    """By its end as a place to go to."""
    work()
    qdo("send", SHARD, "1")
    kinesis.split(stream, SHARD)
    assert qdo("seek", SHARD, "SHARD_END", "--yes").code == 0
    assert work().out == ""
