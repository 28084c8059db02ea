"""Faults between qdo and Kinesis, at the level of HTTP: nothing is lost, and order is kept.

Messages may be stored twice where the answer to a send was lost, and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from qdo.broker_errors import AwsUnreachableError, ExpiredCredentialsError
from qdo.brokers.kinesis.broker import KinesisBroker
from tests.support.aws.fault_proxy import Proxy
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.kinesis import ShardOwner, opened, outgoing

SHARD = "shardId-000000000000"
PASSING = ["throttle", "limit", "error", "unavailable", "reset-before", "reset-after", "slow"]
LOST = ["reset-after", "unanswered"]
"""Faults in which the server applied the request, but its client got no answer."""


@pytest.fixture
def proxy(kinesis_proxy: Proxy) -> Proxy:
    return kinesis_proxy


@pytest.fixture
def broker(kinesis: KinesisStub, aws_stream: str, proxy: Proxy) -> Iterator[KinesisBroker]:
    kinesis.make(aws_stream)
    broker = opened(proxy.url, aws_stream)
    yield broker
    proxy.clear()
    broker.close()


def in_order_without_repetition(broker: KinesisBroker) -> list[int]:
    """Return the stored records; repeated ones stand right behind the first ones of their key."""
    rows = broker.reader(SHARD, 0).fetch(100_000)
    found: list[int] = []
    for key in {row[2] for row in rows}:
        mine = [int(row[1]) for row in rows if row[2] == key]
        assert mine == sorted(mine)
        found += set(mine)
    return sorted(found)


@pytest.mark.parametrize("fault", [*PASSING, "unanswered"])
def test_senders_go_on_after_a_fault(
    broker: KinesisBroker, proxy: Proxy, aws_stream: str, fault: str
) -> None:
    """Everything is stored in the order of its keys, and once where nothing was lost."""
    proxy.spoil(fault, "PutRecords", skip=1, count=2, seconds=0.3)
    broker.send_many(outgoing(aws_stream, range(60), keys=20))
    assert in_order_without_repetition(broker) == list(range(60))
    stored = len(broker.reader(SHARD, 0).fetch(1000))
    assert stored == (60 + 2 * 20 if fault in LOST else 60)


@pytest.mark.parametrize("action", ["GetRecords", "GetShardIterator"])
@pytest.mark.parametrize("fault", [*PASSING, "unanswered"])
def test_owners_go_on_after_a_fault(
    broker: KinesisBroker, proxy: Proxy, aws_stream: str, fault: str, action: str
) -> None:
    """Every message comes once and in order, whatever became of an answer."""
    broker.send_many(outgoing(aws_stream, range(20)))
    proxy.spoil(fault, action, count=2, seconds=0.3)
    owner = ShardOwner(broker, SHARD)
    owner.read(20)
    proxy.spoil(fault, "GetRecords", count=1, seconds=0.3)
    broker.send_many(outgoing(aws_stream, range(20, 30)))
    assert sorted(owner.read(30)) == sorted(b"%d" % number for number in range(30))
    found = [row[0] for row in owner.rows]
    assert found == sorted(set(found))


def test_expired_tokens_are_told_and_tried_again(
    broker: KinesisBroker, proxy: Proxy, aws_stream: str
) -> None:
    """They are renewed behind our back; until then the owner knows why nothing comes."""
    broker.send_many(outgoing(aws_stream, range(5), keys=1))
    proxy.spoil("expired", count=0)
    owner = ShardOwner(broker, SHARD)
    with pytest.raises(ExpiredCredentialsError):
        owner.read(5)
    with pytest.raises(ExpiredCredentialsError):
        broker.send_many(outgoing(aws_stream, [5]))
    proxy.clear()
    assert owner.read(5) == [b"%d" % number for number in range(5)]


def test_a_server_that_stays_away_is_told(
    broker: KinesisBroker, proxy: Proxy, aws_stream: str
) -> None:
    """After some tries; the messages behind it are delivered when the server is back."""
    broker.send_many(outgoing(aws_stream, range(3), keys=1))
    proxy.spoil("unavailable", "GetShardIterator", count=0)
    owner = ShardOwner(broker, SHARD)
    with pytest.raises(AwsUnreachableError):
        owner.read(3)
    proxy.clear()
    assert owner.read(3) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_faults_loses_and_reorders_nothing(
    kinesis: KinesisStub, broker: KinesisBroker, proxy: Proxy, aws_stream: str, seed: int
) -> None:
    """Faults of sends and reads, and rejections of single records."""
    dice = random.Random(seed)
    kinesis.refuse(0.3, seed)
    owner = ShardOwner(broker, SHARD)
    for start in range(0, 120, 30):
        action = dice.choice(["PutRecords", "GetRecords"])
        proxy.spoil(dice.choice([*PASSING, *LOST]), action, skip=dice.randrange(3), seconds=0.1)
        broker.send_many(outgoing(aws_stream, range(start, start + 30), keys=6))
    kinesis.refuse(0.0)
    proxy.clear()
    owner.read_until(lambda: {int(row[1]) for row in owner.rows} == set(range(120)))
    for key in range(6):
        mine = [int(row[1]) for row in owner.rows if row[2] == f"key {key}"]
        assert mine == sorted(mine)
