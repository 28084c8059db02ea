"""The Kinesis broker for senders, owners and onlookers.

Runs on moto, where it does as AWS does, and on the project's own server, which is stricter. What
follows from resharding, rates and retention is in test_broker_kinesis_traps.py.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from qdo.broker_errors import (
    AccessDeniedError,
    AwsNotFoundError,
    AwsUnreachableError,
    CredentialsError,
)
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.kinesis.broker import KinesisBroker
from qdo.brokers.kinesis.codec import MAX_BODY_BYTES
from qdo.brokers.kinesis.positions import FINISHED, sequence_of, time_in
from qdo.coordination.znodes.layout import Layout
from qdo.errors import (
    MessageTooLargeError,
    QueueNameError,
    UnsupportedError,
    UsageError,
)
from qdo.ops.checkpoints import Checkpoint, ImportStep, plan_import
from qdo.ops.fleet import Fleet
from qdo.ops.seek import QueuePosition
from qdo.positions import position_now
from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import Proxy
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.kinesis import ShardOwner, opened, outgoing

SHARD = "shardId-000000000000"
OTHER = "shardId-000000000001"


@pytest.fixture(params=["stub", "moto"])
def endpoint(request: pytest.FixtureRequest) -> str:
    if request.param == "moto":
        return str(request.getfixturevalue("moto_url"))
    stub: KinesisStub = request.getfixturevalue("kinesis")
    return stub.url


@pytest.fixture
def broker(endpoint: str, aws_stream: str) -> Iterator[KinesisBroker]:
    """A stream of two shards."""
    client("kinesis", endpoint).create_stream(StreamName=aws_stream, ShardCount=2)
    broker = opened(endpoint, aws_stream)
    yield broker
    broker.close()


def bodies(broker: KinesisBroker, shard: str, after: int = 0) -> list[bytes]:
    return [row[1] for row in broker.reader(shard, after).fetch(100_000)]


def positions(broker: KinesisBroker, shard: str) -> list[int]:
    return [row[0] for row in broker.reader(shard, 0).fetch(100_000)]


# --- sending ------------------------------------------------------------------------


def test_messages_to_the_stream_go_where_their_key_belongs(
    broker: KinesisBroker, aws_stream: str
) -> None:
    """Each key to one shard, in order; all shards have some."""
    broker.send_many(outgoing(aws_stream, range(300), keys=30))
    rows = {shard: broker.reader(shard, 0).fetch(1000) for shard in (SHARD, OTHER)}
    keys = {shard: {row[2] for row in found} for shard, found in rows.items()}
    assert keys[SHARD]
    assert keys[OTHER]
    assert not keys[SHARD] & keys[OTHER]
    for found in rows.values():
        for key in {row[2] for row in found}:
            numbers = [int(row[1]) for row in found if row[2] == key]
            assert numbers == sorted(numbers)
            assert len(numbers) == 10


def test_messages_without_a_key_are_spread(broker: KinesisBroker, aws_stream: str) -> None:
    """They are sent in few requests, because they need not wait for other messages."""
    ids = broker.send_many(outgoing(aws_stream, range(100)))
    assert len(ids) == 100
    counts = [len(bodies(broker, shard)) for shard in (SHARD, OTHER)]
    assert min(counts) > 10
    assert sum(counts) == 100


BAD_MESSAGES: list[tuple[Outgoing, type[Exception]]] = [
    (Outgoing("a/b", b"1"), QueueNameError),
    (Outgoing("shardId-000000000099", b"1"), UsageError),
    (Outgoing("elsewhere", b"1"), UsageError),
    (Outgoing(SHARD, b"1", key="\ud800"), UsageError),
    (Outgoing(SHARD, b"1", key="x" * 257), UsageError),
    (Outgoing(SHARD, b"1", headers="\udfff"), UsageError),
    (Outgoing(SHARD, bytes(MAX_BODY_BYTES + 2000)), MessageTooLargeError),
    (Outgoing(SHARD, b"1", terms=SendOptions(due=time.time() + 60)), UnsupportedError),
    (Outgoing(SHARD, b"1", terms=SendOptions(dedup_key="k")), UnsupportedError),
]


def test_a_batch_with_a_bad_message_stores_nothing(broker: KinesisBroker) -> None:
    """The good messages before and behind the bad one are not sent either."""
    for bad, error in BAD_MESSAGES:
        with pytest.raises(error):
            broker.send_many([Outgoing(SHARD, b"1"), bad, Outgoing(SHARD, b"2")])
    assert bodies(broker, SHARD) == []


def test_bodies_may_be_empty_or_large(broker: KinesisBroker) -> None:
    """From nothing to the limit; more than a request takes is sent in several."""
    sent = [b"1", b'"%s"' % (b"x" * (MAX_BODY_BYTES - 2)), b"2"]
    sent += [b'"%s"' % (b"%d" % number * 1_000_000) for number in range(8)]
    broker.send_many([Outgoing(SHARD, body, "k") for body in sent])
    broker.send(Outgoing(SHARD, b"", "k", '{"content-type": "text/csv"}'))
    assert bodies(broker, SHARD) == [*sent, b""]


# --- owners -------------------------------------------------------------------------


def test_an_owner_may_be_sent_to_any_position(broker: KinesisBroker) -> None:
    """Back to the beginning, which was done and given up; to a time; and forward again."""
    broker.send_many(outgoing(SHARD, range(5)))
    known = positions(broker, SHARD)
    owner = ShardOwner(broker, SHARD)
    owner.read_to_tip()
    owner.back_to(0)
    assert owner.read_to_tip() == [b"%d" % number for number in range(5)]
    owner.back_to(time_in(known[0]) - 600_000_000)
    assert owner.read_to_tip() == [b"%d" % number for number in range(5)]
    owner.back_to(known[2])
    assert owner.read_to_tip() == [b"3", b"4"]
    owner.close()


def test_a_closed_subscription_asks_for_nothing_more(kinesis: KinesisStub, aws_stream: str) -> None:
    """Closing returns at once; open requests end, and no others follow."""
    kinesis.make(aws_stream, 2)
    broker = opened(kinesis.url, aws_stream)
    owner, other = ShardOwner(broker, SHARD), ShardOwner(broker, OTHER)
    owner.read_to_tip()
    owner.close()
    other.read_to_tip()
    before = len(kinesis.reads(aws_stream, SHARD))
    seen = len(kinesis.reads(aws_stream, OTHER))
    other.read_until(lambda: len(kinesis.reads(aws_stream, OTHER)) >= seen + 4)
    assert len(kinesis.reads(aws_stream, SHARD)) <= before + 1
    broker.close()


# --- onlookers ----------------------------------------------------------------------


def test_nothing_is_kept_of_a_closed_subscription(broker: KinesisBroker) -> None:
    """It has thousands of messages in flight, and shards come and go for months."""
    broker.send_many(outgoing(SHARD, range(10)))
    owner = ShardOwner(broker, SHARD)
    owner.read(10)
    known = weakref.ref(owner.subscription)
    owner.close()
    assert owner.subscription.join(10)  # type: ignore[attr-defined]
    del owner
    gc.collect()
    assert known() is None


def test_a_new_subscription_survives_the_end_of_the_old_one(broker: KinesisBroker) -> None:
    """The claim of a queue may begin again before the last request of the one before is over."""
    owners = [ShardOwner(broker, SHARD), ShardOwner(broker, SHARD)]
    owners[1].read_to_tip()
    owners[0].close()
    assert owners[0].subscription.join(10)  # type: ignore[attr-defined]
    assert broker._subscriptions[SHARD] is owners[1].subscription
    owners[1].close()


def test_a_reader_goes_on_where_it_stopped(broker: KinesisBroker) -> None:
    """Each fetch continues after the last one; the tip yields nothing until new messages come."""
    broker.send_many(outgoing(SHARD, range(10)))
    reader = broker.reader(SHARD, 0)
    assert [len(reader.fetch(4)) for _ in range(4)] == [4, 4, 2, 0]
    broker.send(Outgoing(SHARD, b"new"))
    assert [row[1] for row in reader.fetch(4)] == [b"new"]


def test_only_positions_of_a_shard_can_be_imported(broker: KinesisBroker) -> None:
    """Not a sequence number that it never had, nor the end of a shard that is open."""
    broker.send_many(outgoing(SHARD, range(2)))
    known = positions(broker, SHARD)
    last, text = time_in(known[0]), broker.positions.to_text(known[0])
    never = str(sequence_of(known[1]) * 2)
    layout = Layout.of("a")

    def plan(queue: str, position: str | None) -> ImportStep:
        checkpoint = Checkpoint(queue, last, position)
        return plan_import(Fleet(None, layout, broker), [checkpoint], "id")[0]

    found = plan(SHARD, text)
    assert (found.outcome, found.after) == ("create", QueuePosition(last, text))
    refused = [plan(SHARD, never), plan(SHARD, "x"), plan(SHARD, FINISHED), plan("nowhere", text)]
    assert [(each.outcome, each.after) for each in refused] == [("skipped", None)] * 4
    assert all(each.note for each in refused)


def test_backlog_is_one_or_zero_and_has_an_age(
    broker: KinesisBroker,
) -> None:
    """Kinesis cannot count: 1 stands for any number."""
    assert broker.catalog.backlog(SHARD, 0).count == 0
    broker.send_many(outgoing(SHARD, range(3)))
    known = positions(broker, SHARD)
    for after in (0, known[0], known[1]):
        found = broker.catalog.backlog(SHARD, after)
        assert (found.count, found.approximate) == (1, True)
        assert found.oldest == known[0 if not after else known.index(after) + 1]
        assert found.behind_seconds is not None
        assert 0 <= found.behind_seconds < 60
    nothing = broker.catalog.backlog(SHARD, known[2])
    assert (nothing.count, nothing.oldest) == (0, None)


def test_the_backlog_of_an_own_queue_costs_no_request(
    kinesis: KinesisStub, aws_stream: str
) -> None:
    """Its owner knows it."""
    kinesis.make(aws_stream)
    broker = opened(kinesis.url, aws_stream)
    broker.send_many(outgoing(SHARD, range(3)))
    owner = ShardOwner(broker, SHARD)
    owner.read_to_tip()
    before = kinesis.requests()["GetShardIterator"]
    assert broker.catalog.backlog(SHARD, owner.rows[-1][0]).count == 0
    assert broker.catalog.backlog(SHARD, owner.rows[-1][0]).oldest is None
    assert kinesis.requests()["GetShardIterator"] == before
    broker.close()


def test_shards_that_do_not_exist_have_no_backlog(broker: KinesisBroker) -> None:
    """Their time is over, or has not come."""
    assert broker.catalog.backlog("shardId-000000000077", 0).count == 0
    assert broker.reader("shardId-000000000077", 0).fetch(5) == []


def test_queues_are_shards(broker: KinesisBroker) -> None:
    """By their names; those that a stream begins with came out of none."""
    assert broker.catalog.names() == [SHARD, OTHER]
    assert broker.catalog.parents(SHARD) == ()
    assert broker.trim(SHARD, position_now(), 0.0) == 0


# --- impossible cases ---------------------------------------------------------------


def test_a_missing_stream_is_named(endpoint: str) -> None:
    """The error has its region and a remedy."""
    with pytest.raises(AwsNotFoundError, match="'nowhere' does not exist in region us-east-1"):
        opened(endpoint, "nowhere")


def test_a_server_out_of_reach_is_named() -> None:
    """At the start, not by a stack trace."""
    with pytest.raises(AwsUnreachableError):
        opened("http://127.0.0.1:9", "s")


@pytest.fixture
def proxy(kinesis_proxy: Proxy) -> Proxy:
    return kinesis_proxy


def test_what_is_not_allowed_is_named(kinesis: KinesisStub, aws_stream: str, proxy: Proxy) -> None:
    """The error names the action and the resource, which the policy must allow."""
    kinesis.make(aws_stream)
    proxy.spoil("denied", "ListShards")
    with pytest.raises(AccessDeniedError, match="kinesis:ListShards"):
        opened(proxy.url, aws_stream)
    broker = opened(proxy.url, aws_stream)
    proxy.spoil("denied", "PutRecords", count=0)
    with pytest.raises(AccessDeniedError, match=f"kinesis:PutRecords on stream '{aws_stream}'"):
        broker.send(Outgoing(SHARD, b"1"))
    proxy.spoil("denied", "GetRecords", count=0)
    with pytest.raises(AccessDeniedError, match="kinesis:GetRecords"):
        ShardOwner(broker, SHARD).read(1)
    broker.close()


def test_unknown_credentials_are_named(kinesis: KinesisStub, aws_stream: str, proxy: Proxy) -> None:
    """At the start."""
    kinesis.make(aws_stream)
    proxy.spoil("unknown", count=0)
    with pytest.raises(CredentialsError, match="credentials"):
        opened(proxy.url, aws_stream)


def test_a_stream_deleted_under_its_owner_is_named(kinesis: KinesisStub, aws_stream: str) -> None:
    """Its owner gets an error at every fetch."""
    kinesis.make(aws_stream)
    broker = opened(kinesis.url, aws_stream)
    owner = ShardOwner(broker, SHARD)
    owner.read_to_tip()
    kinesis.client.delete_stream(StreamName=aws_stream)
    for _ in range(2):
        with pytest.raises(AwsNotFoundError, match=aws_stream):
            owner.read(1)
    broker.close()


def test_larger_records_are_sent_where_the_stream_takes_them(
    kinesis: KinesisStub, aws_stream: str
) -> None:
    """It is asked when a message needs it."""
    kinesis.make(aws_stream)
    broker = opened(kinesis.url, aws_stream)
    body = b'"%s"' % (b"x" * 3_000_000)
    with pytest.raises(MessageTooLargeError, match="1048576"):
        broker.send(Outgoing(SHARD, body))
    broker.close()
    kinesis.set(record_kib=10_240)
    broker = opened(kinesis.url, aws_stream)
    broker.send_many([Outgoing(SHARD, body, "k") for _ in range(3)])
    assert bodies(broker, SHARD) == [body] * 3
    assert sequence_of(positions(broker, SHARD)[0]) > 0
    broker.close()
