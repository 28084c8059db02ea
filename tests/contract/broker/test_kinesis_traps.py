"""The traps of Kinesis, by the numbers of the table in docs/kinesis.rst.

On the project's own server: moto moves records when a shard is split, and ends no shard.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from aws_kinesis_agg.aggregator import RecordAggregator

from qdo.broker_errors import AwsError, AwsNotFoundError, PositionTrimmedError
from qdo.brokers.base import Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.kinesis.api import SKEW_SECONDS
from qdo.brokers.kinesis.broker import KinesisBroker
from qdo.brokers.kinesis.codec import hash_key
from qdo.brokers.kinesis.positions import pack, sequence_of
from qdo.errors import UnsupportedError, UsageError
from qdo.positions import position_now
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.aws.clients import client
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.aws.kinesis_stream import ITERATOR_SECONDS
from tests.support.kinesis import BRISK, ShardOwner, opened, outgoing
from tests.support.policies import in_force
from tests.support.processes import wait_until

SHARD = "shardId-000000000000"
OTHER = "shardId-000000000001"
DAY = 86_400.0


@pytest.fixture
def stream(kinesis: KinesisStub, aws_stream: str) -> str:
    """A stream of one shard."""
    kinesis.make(aws_stream)
    return aws_stream


@pytest.fixture
def broker(kinesis: KinesisStub, stream: str) -> Iterator[KinesisBroker]:
    broker = opened(kinesis.url, stream)
    yield broker
    broker.close()


@pytest.fixture
def later(kinesis: KinesisStub) -> Iterator[KinesisStub]:
    """A server with a stream from the past; the test moves its time up to the present."""
    yield kinesis
    kinesis.client.delete_stream(StreamName="s")


def long_ago(stub: KinesisStub, seconds: float) -> None:
    """Make a stream at a time in the past, which is the present of the server."""
    stub.advance(-seconds)
    stub.make("s")


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def recorded(broker: KinesisBroker, position: int, age_seconds: float = 0.0) -> int:
    """Return a position as the next owner finds it in the queue node."""
    time_of_last = position_now() - round(age_seconds * 10_000_000)
    return broker.positions.resume_after(time_of_last, broker.positions.to_text(position))


# --- 1: reads are shared ------------------------------------------------------------


@pytest.mark.parametrize("rate", [2.0, 4.0])
def test_trap_1_a_shard_is_read_no_faster_than_configured(
    kinesis: KinesisStub, stream: str, rate: float
) -> None:
    """Whether reads return records or not, and for all readers in this process."""
    broker = opened(kinesis.url, stream, f"reads_per_second={rate:g}")
    owner = ShardOwner(broker, SHARD)
    broker.send_many(outgoing(SHARD, range(50)))
    reader = broker.reader(SHARD, 0)
    owner.read_until(lambda: bool(reader.fetch(1)) and len(kinesis.reads(stream, SHARD)) >= 8)
    broker.close()
    times = [at for at, _ in kinesis.reads(stream, SHARD)]
    assert len(times) >= 8
    # Each may be late, so that the next one seems to be early.
    assert times[-1] - times[0] > 0.9 * (len(times) - 1) / rate


def test_trap_1_other_consumers_slow_it_down_and_nothing_is_lost(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Throttled reads are retried later and logged."""
    kinesis.set(reads_per_second=1)
    broker.send_many(outgoing(SHARD, range(20)))
    owner = ShardOwner(broker, SHARD)
    with caplog.at_level(logging.INFO):
        owner.read_to_tip()
        broker.send_many(outgoing(SHARD, range(20, 25)))
        assert owner.read(25) == numbers(25)
        owner.read_until(lambda: any(map(is_delay, caplog.records)))


def is_delay(record: logging.LogRecord) -> bool:
    """Return whether a log record states the pause of a shard."""
    return isinstance(record.args, tuple) and record.args[0] == SHARD and len(record.args) == 2


def test_trap_1_onlookers_take_no_more_than_they_need(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """Each of their reads is one less for the owner in the same second."""
    broker.send_many(outgoing(stream, range(500)))
    after = broker.reader(SHARD, 0).fetch(3)[1][0]
    assert broker.catalog.backlog(SHARD, 0).count == 1
    assert broker.catalog.backlog(SHARD, after).count == 1
    assert [count for _, count in kinesis.reads(stream, SHARD)] == [4, 2, 2]


# --- 2: iterators expire ------------------------------------------------------------


def test_trap_2_expired_iterators_are_replaced(later: KinesisStub) -> None:
    """A job may take longer than the five minutes of an iterator."""
    long_ago(later, 3600)
    broker = opened(later.url, "s")
    broker.send_many(outgoing(SHARD, range(10)))
    owner = ShardOwner(broker, SHARD)
    assert owner.read(10) == numbers(10)
    for count in (11, 12):
        asked = later.requests()["GetShardIterator"]
        later.advance(ITERATOR_SECONDS + 1)
        broker.send(Outgoing(SHARD, b"%d" % (count - 1)))
        assert owner.read(count) == numbers(count)
        assert later.requests()["GetShardIterator"] == asked + 1
    broker.close()


# --- 3: empty answers ---------------------------------------------------------------


def test_trap_3_empty_answers_are_not_the_tip(kinesis: KinesisStub, broker: KinesisBroker) -> None:
    """It takes several reads to get to the first record: for the owner, and for onlookers."""
    broker.send_many(outgoing(SHARD, range(5)))
    kinesis.set(empty=3)
    assert [row[1] for row in broker.reader(SHARD, 0).fetch(10)] == numbers(5)
    owner = ShardOwner(broker, SHARD)
    assert owner.read_to_tip() == numbers(5)
    after = owner.rows[2][0]
    owner.close()
    next_owner = ShardOwner(broker, SHARD, recorded(broker, after))
    assert next_owner.read_to_tip() == numbers(2, 3)


# --- 4: lag -------------------------------------------------------------------------


def test_trap_4_lag_grows_while_a_message_is_not_done(broker: KinesisBroker) -> None:
    """It is the age of the oldest of them; at the tip it is nothing."""
    broker.send_many(outgoing(SHARD, range(3)))
    owner = ShardOwner(broker, SHARD, confirm=False)
    owner.read_to_tip()
    first = broker.catalog.backlog(SHARD, 0).behind_seconds
    assert first is not None
    wait_until(
        lambda: (broker.catalog.backlog(SHARD, 0).behind_seconds or 0) > first + 0.5,
        "the lag grows",
    )
    owner.subscription.done_through(owner.rows[-1][0])
    owner.read_to_tip()
    behind = broker.catalog.backlog(SHARD, owner.rows[-1][0]).behind_seconds
    assert behind is not None
    assert behind < first + 0.5


# --- 5: numbers and aggregates ------------------------------------------------------


def packed(*messages: tuple[str, bytes]) -> bytes:
    aggregator = RecordAggregator()
    for key, body in messages:
        aggregator.add_user_record(key, body)
    contents: bytes = aggregator.clear_and_get().get_contents()[2]
    return contents


def test_trap_5_aggregated_records_are_messages_each(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """With keys and positions of their own, between ordinary ones; one can be resumed within."""
    broker.send(Outgoing(SHARD, b"0", "a"))
    data = packed(("a", b"1"), ("b", b"2"), ("a", b"3"))
    kinesis.client.put_record(StreamName=stream, Data=data, PartitionKey="a")
    broker.send(Outgoing(SHARD, b"4", "c"))
    owner = ShardOwner(broker, SHARD)
    assert owner.read_to_tip() == numbers(5)
    assert [row[2] for row in owner.rows] == ["a", "a", "b", "a", "c"]
    found = [row[0] for row in owner.rows]
    assert found == sorted(set(found))
    assert sequence_of(found[1]) == sequence_of(found[3])
    owner.close()
    for done in range(1, 6):
        after = recorded(broker, found[done - 1])
        next_owner = ShardOwner(broker, SHARD, after)
        assert next_owner.read_to_tip() == numbers(5 - done, done)
        next_owner.close()


def test_trap_5_places_are_those_of_records(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """Or older than all of them; what lies ahead is found to be none with the first answer."""
    broker.send_many(outgoing(SHARD, range(50)))
    rows = broker.reader(SHARD, 0).fetch(50)
    for place in (rows[0][0], rows[-1][0], pack(7, 0, 1)):
        assert broker.catalog.has_position(SHARD, place)
    reads = len(kinesis.reads(stream, SHARD))
    ahead = sequence_of(rows[-1][0]) + 10**30
    assert not broker.catalog.has_position(SHARD, pack(ahead, 0, position_now()))
    assert len(kinesis.reads(stream, SHARD)) == reads + 1


def test_trap_5_messages_that_a_reshard_led_astray_are_left_out(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """Their producer sends them again to the shard of their key."""
    kinesis.split(stream, SHARD)
    keys = {name: each["HashKeyRange"] for name, each in kinesis.shards(stream).items()}
    low = int(keys[OTHER]["EndingHashKey"])
    mine = next(key for key in map(str, range(100)) if hash_key(key) <= low)
    other = next(key for key in map(str, range(100)) if hash_key(key) > low)
    data = packed((mine, b"1"), (other, b"2"), (mine, b"3"))
    kinesis.client.put_record(StreamName=stream, Data=data, PartitionKey=mine)
    owner = ShardOwner(broker, OTHER)
    assert owner.read_to_tip() == [b"1", b"3"]


# --- 6 and 7: resharding ------------------------------------------------------------


def test_trap_6_children_name_their_parents(kinesis: KinesisStub, aws_stream: str) -> None:
    """One parent after a split, two after a merge; the new queue has to wait for these."""
    kinesis.make(aws_stream, 2)
    broker = opened(kinesis.url, aws_stream)
    kinesis.split(aws_stream, SHARD)
    kinesis.merge(aws_stream, "shardId-000000000003", OTHER)
    assert broker.catalog.parents("shardId-000000000002") == (SHARD,)
    assert set(broker.catalog.parents("shardId-000000000004")) == {"shardId-000000000003", OTHER}
    assert broker.catalog.names() == [f"shardId-{number:012d}" for number in range(5)]
    broker.close()


def test_trap_6_parents_stay_named_when_they_have_expired(later: KinesisStub) -> None:
    """A queue that waits for its parents can see from the list that they are gone."""
    long_ago(later, 2 * DAY)
    broker = opened(later.url, "s")
    later.split("s", SHARD)
    later.advance(2 * DAY)
    assert broker.catalog.names() == [OTHER, "shardId-000000000002"]
    assert broker.catalog.parents(OTHER) == (SHARD,)
    broker.close()


def test_trap_7_a_shard_ends_after_its_last_message(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """Not before everything was fetched; its position then is its end."""
    broker.send_many(outgoing(SHARD, range(40)))
    kinesis.split(stream, SHARD)
    owner = ShardOwner(broker, SHARD)
    ends = []
    owner.read_until(
        lambda: ends.append(owner.subscription.end) or len(owner.rows) == 40  # type: ignore[func-returns-value]
    )
    assert set(ends[:-1]) <= {None}
    assert owner.read_to_end() == numbers(40)
    end = owner.subscription.end
    assert end is not None
    assert end > owner.rows[-1][0]
    assert broker.positions.to_text(end) == broker.capabilities.end_position_text == "SHARD_END"


def test_trap_7_an_owner_that_goes_back_is_not_at_the_end(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """A failed message is not done, even after the last answer of Kinesis for the shard."""
    broker.send_many(outgoing(SHARD, range(5)))
    kinesis.split(stream, SHARD)
    owner = ShardOwner(broker, SHARD, confirm=False)
    owner.read_to_end()
    owner.back_to(owner.rows[1][0])
    assert owner.subscription.end is None
    assert owner.read_to_end() == numbers(3, 2)


@pytest.mark.parametrize("start", ["oldest", "latest"])
def test_trap_7_children_begin_with_their_first_message(
    kinesis: KinesisStub, stream: str, start: str
) -> None:
    """Also where shards begin with the newest: these messages came after everything else."""
    broker = opened(kinesis.url, stream, f"{BRISK}&start={start}")
    kinesis.split(stream, SHARD)
    broker.send_many(outgoing(OTHER, range(5)))
    owner = ShardOwner(broker, OTHER)
    assert owner.read_to_tip() == numbers(5)
    broker.close()


@pytest.mark.parametrize("seed", range(4))
def test_trap_7_no_reshard_loses_or_repeats_a_message(
    kinesis: KinesisStub, aws_stream: str, seed: int
) -> None:
    """Splits and merges while messages come; parents are read to their end before children."""
    dice = random.Random(seed)
    kinesis.make(aws_stream, 2)
    broker = opened(kinesis.url, aws_stream)
    sent = 0
    for _ in range(6):
        broker.send_many(outgoing(aws_stream, range(sent, sent + 30), keys=10))
        sent += 30
        shards = sorted(
            (each for each in broker.shards.list() if not each.closed), key=lambda x: x.hash_keys
        )
        if len(shards) > 1 and dice.random() < 0.5:
            index = dice.randrange(len(shards) - 1)
            kinesis.merge(aws_stream, shards[index].name, shards[index + 1].name)
        else:
            kinesis.split(aws_stream, dice.choice(shards).name)
    found = _read_in_order(broker, dice)
    assert sorted(map(int, (body for body, _ in found))) == list(range(sent))
    for key in {key for _, key in found}:
        mine = [int(body) for body, of in found if of == key]
        assert mine == sorted(mine)
    broker.close()


def _read_in_order(broker: KinesisBroker, dice: random.Random) -> list[tuple[bytes, str | None]]:
    """Read each shard once its parents are read, in any order that allows."""
    left, found = broker.catalog.names(), []
    finished: set[str] = set()
    while left:
        ready = [name for name in left if set(broker.catalog.parents(name)) <= finished]
        name = dice.choice(ready)
        owner = ShardOwner(broker, name)
        shard = broker.shards.known(name)
        if shard is not None and shard.closed:
            owner.read_to_end()
        else:
            owner.read_to_tip()
        found += [(row[1], row[2]) for row in owner.rows]
        owner.close()
        left.remove(name)
        finished.add(name)
    return found


def test_trap_7_sending_to_a_closed_shard_is_refused(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """With the remedy; one that was closed a moment ago takes nothing either: its child does."""
    kinesis.split(stream, SHARD)
    broker.send(Outgoing(SHARD, b"0"))  # it was open when it was listed
    with pytest.raises(UsageError, match=f"'{SHARD}' .*'{stream}'"):
        broker.send(Outgoing(SHARD, b"1"))
    assert [row[1] for row in broker.reader(OTHER, 0).fetch(10)] == [b"0"]


# --- 8 and 9: shards that are over --------------------------------------------------


def test_trap_8_a_finished_shard_is_not_read_again(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """Its tombstone marks it as finished, as long as the tombstone is kept."""
    broker.send_many(outgoing(SHARD, range(5)))
    kinesis.split(stream, SHARD)
    after = broker.positions.resume_after(position_now(), broker.capabilities.end_position_text)
    owner = ShardOwner(broker, SHARD, after)
    assert owner.read_to_end() == []
    assert owner.subscription.at_tip()
    assert kinesis.reads(stream, SHARD) == []
    assert broker.catalog.backlog(SHARD, after).count == 0


def test_trap_9_an_empty_closed_shard_ends_with_the_first_look(
    kinesis: KinesisStub, broker: KinesisBroker, stream: str
) -> None:
    """Changing the number of shards makes such in between."""
    kinesis.split(stream, SHARD)
    kinesis.merge(stream, OTHER, "shardId-000000000002")
    owner = ShardOwner(broker, OTHER)
    assert owner.read_to_end() == []
    assert len(kinesis.reads(stream, OTHER)) == 1


# --- 10: positions that are gone ----------------------------------------------------


def half_read(stub: KinesisStub, seconds: float) -> int:
    """Return the position of the third of five messages that were sent so long ago."""
    long_ago(stub, seconds)
    broker = opened(stub.url, "s")
    broker.send_many(outgoing(SHARD, range(5)))
    position: int = broker.reader(SHARD, 0).fetch(10)[2][0]
    broker.close()
    return position


def test_trap_10_a_trimmed_position_stops_the_queue(later: KinesisStub) -> None:
    """Each attempt raises the error; no message behind the gap is returned."""
    after = half_read(later, 2 * DAY)
    later.advance(2 * DAY)
    broker = opened(later.url, "s")
    broker.send(Outgoing(SHARD, b"new"))
    owner = ShardOwner(broker, SHARD, recorded(broker, after, age_seconds=2 * DAY))
    for _ in range(2):
        with pytest.raises(PositionTrimmedError) as caught:
            owner.read(1)
        assert caught.value.details["hours"] == "24"
    assert owner.rows == []
    broker.close()


def test_trap_10_it_goes_on_with_the_oldest_if_so_configured(
    later: KinesisStub, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the messages that may be lost."""
    after = half_read(later, 2 * DAY)
    later.advance(2 * DAY)
    broker = opened(later.url, "s", f"{BRISK}&trimmed=oldest")
    broker.send_many([Outgoing(SHARD, b"new"), Outgoing(SHARD, b"newer")])
    owner = ShardOwner(broker, SHARD, recorded(broker, after, age_seconds=2 * DAY))
    assert owner.read_to_tip() == [b"new", b"newer"]
    (warning,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    assert isinstance(warning.args, tuple)
    assert isinstance(warning.args[0], PositionTrimmedError)
    broker.close()


def test_trap_10_a_quiet_shard_lost_nothing(later: KinesisStub) -> None:
    """Its last record is long gone, but its tip was recorded not long ago."""
    after = half_read(later, 2 * DAY)
    later.advance(2 * DAY)
    broker = opened(later.url, "s")
    owner = ShardOwner(broker, SHARD, recorded(broker, after, age_seconds=0.5 * DAY))
    assert owner.read_to_tip() == []
    broker.send(Outgoing(SHARD, b"new"))
    assert owner.read(1) == [b"new"]
    broker.close()


def test_trap_14_the_tip_of_a_quiet_shard_is_recorded(later: KinesisStub) -> None:
    """By a position that names the same record and a later time."""
    half_read(later, 3600)
    broker = opened(later.url, "s")
    last = broker.reader(SHARD, 0).fetch(10)[-1][0]
    later.advance(3600)
    owner = ShardOwner(broker, SHARD, last)
    owner.read_until(lambda: owner.subscription.fetched_through is not None)
    reached = owner.subscription.fetched_through
    assert reached is not None
    assert reached > last
    assert broker.positions.to_text(reached) == broker.positions.to_text(last)
    age = (position_now() - broker.positions.to_time(reached)) / 10_000_000
    assert SKEW_SECONDS <= age < SKEW_SECONDS + 60
    reads = len(later.reads("s", SHARD))
    owner.read_until(lambda: len(later.reads("s", SHARD)) > reads + 3)
    assert owner.subscription.fetched_through == reached
    owner.back_to(last)  # as owners do that had nothing to do for a while
    owner.fetch()
    assert owner.subscription.fetched_through == reached
    owner.back_to(reached)
    assert owner.read_to_tip() == []
    broker.close()


def test_trap_10_a_stream_made_anew_is_not_read_as_the_old_one(later: KinesisStub) -> None:
    """Same names, other records: the position means nothing there."""
    after = half_read(later, 120)
    later.client.delete_stream(StreamName="s")
    later.advance(60)
    later.make("s")
    later.advance(60)
    broker = opened(later.url, "s")
    broker.send(Outgoing(SHARD, b"new"))
    owner = ShardOwner(broker, SHARD, recorded(broker, after, age_seconds=120))
    with pytest.raises(PositionTrimmedError, match=SHARD):
        owner.read(1)
    broker.close()


@pytest.mark.parametrize("trimmed", ["stop", "oldest"])
def test_trap_10_a_shard_that_expired_unread_is_told_or_ended(
    later: KinesisStub, trimmed: str
) -> None:
    """Its children wait for one or the other."""
    after = half_read(later, 2 * DAY)
    later.split("s", SHARD)
    later.advance(2 * DAY)
    broker = opened(later.url, "s", f"{BRISK}&trimmed={trimmed}")
    owner = ShardOwner(broker, SHARD, recorded(broker, after, age_seconds=2 * DAY))
    if trimmed == "stop":
        with pytest.raises(PositionTrimmedError, match=SHARD):
            owner.read(1)
    else:
        assert owner.read_to_end() == []
    broker.close()


def test_trap_10_an_expired_shard_ends_after_a_seek(
    later: KinesisStub, caplog: pytest.LogCaptureFixture
) -> None:
    """As the error advises: nothing is left, and its children can begin."""
    half_read(later, 2 * DAY)
    later.split("s", SHARD)
    later.advance(2 * DAY)
    broker = opened(later.url, "s")
    owner = ShardOwner(broker, SHARD, broker.positions.earliest)
    assert owner.read_to_end() == []
    assert [each.args for each in caplog.records if each.levelno == logging.WARNING] == [(SHARD,)]
    broker.close()


@pytest.mark.parametrize("trimmed", ["stop", "oldest"])
def test_trap_10_a_shard_expires_under_its_owner(later: KinesisStub, trimmed: str) -> None:
    """Its messages in flight are returned; then it counts as expired, not as a missing stream."""
    long_ago(later, 2 * DAY)
    broker = opened(later.url, "s", f"{BRISK}&trimmed={trimmed}")
    for start in range(0, 6000, 500):  # one request for 500; `send_many` makes one for each
        records = [{"Data": each, "PartitionKey": "k"} for each in numbers(500, start)]
        later.client.put_records(StreamName="s", Records=records)
    owner = ShardOwner(broker, SHARD)
    owner.read_until(lambda: len(owner.rows) >= 100)
    wait_until(
        lambda: sum(count for _, count in later.reads("s", SHARD)) == 6000, "all are in flight"
    )
    later.split("s", SHARD)
    later.advance(2 * DAY)
    if trimmed == "stop":
        with pytest.raises(PositionTrimmedError, match=SHARD):
            owner.read(7000)
        owner.back_to(broker.positions.earliest)
        assert owner.read_to_end() == []
    else:
        assert len(owner.read_to_end()) == 6000
    broker.close()


# --- 11: dead letters ---------------------------------------------------------------


def letter(position: int, queue: str = SHARD) -> DeadLetterRecord:
    return dead_letter(queue, position, body=b"\x00\xff{}", headers='{"content-type": "a/b"}')


@pytest.fixture
def keeping(moto_url: str, aws_stream: str, aws_bucket: str) -> Iterator[KinesisBroker]:
    """A stream on moto, which has a bucket as well."""
    client("kinesis", moto_url).create_stream(StreamName=aws_stream, ShardCount=2)
    client("s3", moto_url).create_bucket(Bucket=aws_bucket)
    broker = opened(moto_url, aws_stream, f"{BRISK}&dead_letters=s3://{aws_bucket}/some/where")
    yield broker
    broker.close()


def test_trap_11_dead_letters_are_kept_whole(keeping: KinesisBroker) -> None:
    """By queue, oldest first; storing a message twice keeps the first dead letter."""
    one, two = letter(pack(2**185, 3, 5)), letter(pack(7, 0, 5), OTHER)
    keeping.dead_letters.store(one)
    keeping.dead_letters.store(two)
    keeping.dead_letters.store(letter(one.position))
    assert keeping.dead_letters.records() == [two, one]
    assert keeping.dead_letters.records(SHARD) == [one]
    assert keeping.dead_letters.get(OTHER, two.position) == two
    assert keeping.dead_letters.get(OTHER, one.position) is None
    assert keeping.dead_letters.counts() == {SHARD: 1, OTHER: 1}
    assert [each.body_bytes for each in keeping.dead_letters.find(error="VALUE")] == [4, 4]


def test_trap_11_dead_letters_are_sent_again_or_discarded(keeping: KinesisBroker) -> None:
    """Sent to the end of their queue, with the id of the first time; gone afterwards."""
    position = pack(2**185, 3, 5)
    keeping.dead_letters.store(letter(position))
    keeping.dead_letters.store(letter(pack(8, 0, 5)))
    (moved, missing) = keeping.dead_letters.retry([(SHARD, position), (SHARD, 99)])
    assert missing is None
    (row,) = keeping.reader(SHARD, 0).fetch(10)
    assert moved is not None
    assert sequence_of(moved) == sequence_of(row[0])
    assert row[1:3] == (b"\x00\xff{}", "k")
    assert f'"qdo-id":"{2**185}:3"' in str(row[3])
    assert keeping.dead_letters.discard([(SHARD, pack(8, 0, 5)), (SHARD, 1)]) == [True, False]
    assert keeping.dead_letters.records() == []


def test_trap_11_a_forged_dead_letter_cannot_change_queues(
    keeping: KinesisBroker, moto_url: str, aws_bucket: str
) -> None:
    """Its name says one queue, and its content another, to which a retry would send it."""
    keeping.dead_letters.store(letter(5, OTHER))
    s3: Any = client("s3", moto_url)
    (found,) = s3.list_objects_v2(Bucket=aws_bucket)["Contents"]
    data = s3.get_object(Bucket=aws_bucket, Key=found["Key"])["Body"].read()
    name = found["Key"].replace(OTHER, SHARD)
    s3.put_object(Bucket=aws_bucket, Key=name, Body=data)
    assert [each.queue for each in keeping.dead_letters.records()] == [OTHER]
    with pytest.raises(AwsError) as caught:
        keeping.dead_letters.retry([(SHARD, 5)])
    assert caught.value.details["code"] == "ValueError"
    assert keeping.reader(OTHER, 0).fetch(10) == []


def test_trap_11_without_a_place_dead_letters_are_refused(broker: KinesisBroker) -> None:
    """The error names the option for a store."""
    assert broker.dead_letters.records() == []
    with pytest.raises(UnsupportedError, match="dead_letters=s3://BUCKET/PREFIX"):
        broker.dead_letters.store(letter(5))


def test_trap_11_a_worker_is_told_at_its_start(
    broker: KinesisBroker, keeping: KinesisBroker
) -> None:
    """If a policy ends with a dead letter, but there is no store for it."""
    (told,) = broker.catalog.config_warnings({SHARD: in_force(), OTHER: in_force(then="block")})
    assert "dead_letters=s3://BUCKET/PREFIX" in told
    assert broker.catalog.config_warnings({SHARD: in_force(then="skip")}) == []
    assert keeping.catalog.config_warnings({SHARD: in_force()}) == []


def test_trap_11_a_missing_bucket_is_named_at_the_start(moto_url: str, aws_stream: str) -> None:
    """Not when the first message has failed."""
    client("kinesis", moto_url).create_stream(StreamName=aws_stream, ShardCount=1)
    with pytest.raises(AwsNotFoundError, match="no-such-bucket"):
        opened(moto_url, aws_stream, "dead_letters=s3://no-such-bucket/x")


# --- 15: where to begin -------------------------------------------------------------


def test_trap_15_shards_begin_with_the_oldest_unless_told(
    kinesis: KinesisStub, stream: str
) -> None:
    """With the newest, or a time; a position counts more than either."""
    broker = opened(kinesis.url, stream)
    broker.send(Outgoing(SHARD, b"0"))
    middle = broker.reader(SHARD, 0).fetch(1)[0][0]
    assert ShardOwner(broker, SHARD).read_to_tip() == [b"0"]
    broker.close()
    for start in ("latest", "2020-01-01T00:00:00Z"):
        broker = opened(kinesis.url, stream, f"{BRISK}&start={start}")
        broker.send(Outgoing(SHARD, b"1"))
        assert ShardOwner(broker, SHARD, recorded(broker, middle)).read_to_tip()[:1] == [b"1"]
        broker.close()


def assert_nothing_is_skipped(broker: KinesisBroker) -> None:
    """Let an owner read nothing; the next one gets what was sent meanwhile. Then close."""
    owner = ShardOwner(broker, SHARD)
    owner.read_until(lambda: owner.subscription.fetched_through is not None)
    assert owner.rows == []
    reached = owner.subscription.fetched_through
    assert reached is not None
    owner.close()
    assert broker.positions.to_text(reached) is None
    broker.send(Outgoing(SHARD, b"meanwhile"))
    next_owner = ShardOwner(broker, SHARD, broker.positions.resume_after(reached, None))
    assert next_owner.read_to_tip() == [b"meanwhile"]
    broker.close()


def test_trap_15_the_newest_is_recorded_before_the_first_message(
    later: KinesisStub,
) -> None:
    """After a restart, a new owner does not skip messages that came meanwhile."""
    long_ago(later, 30)
    broker = opened(later.url, "s", f"{BRISK}&start=latest")
    broker.send(Outgoing(SHARD, b"old"))
    later.advance(30)
    assert_nothing_is_skipped(broker)


@pytest.mark.parametrize("ahead_seconds", [3, 280])
def test_trap_15_a_clock_that_is_ahead_skips_nothing(
    later: KinesisStub, ahead_seconds: int
) -> None:
    """The tip of a shard without messages is recorded as a time, and AWS dates them by its own."""
    long_ago(later, ahead_seconds)
    broker = opened(later.url, "s")
    assert_nothing_is_skipped(broker)


@pytest.mark.parametrize("ahead_seconds", [60, 280])
def test_trap_15_a_clock_that_is_ahead_begins_with_the_newest(
    later: KinesisStub, caplog: pytest.LogCaptureFixture, ahead_seconds: int
) -> None:
    """AWS rejects a time in the future, and no message may be missed until that time."""
    long_ago(later, 3600 + ahead_seconds)
    broker = opened(later.url, "s", f"{BRISK}&start=latest")
    broker.send(Outgoing(SHARD, b"old"))
    later.advance(3600)
    owner = ShardOwner(broker, SHARD)
    owner.read_until(lambda: owner.subscription.fetched_through is not None)
    broker.send(Outgoing(SHARD, b"new"))
    assert owner.read(1) == [b"new"]
    warnings = [each.args for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == [(SHARD, SKEW_SECONDS / 60)]
    broker.close()


def test_trap_15_a_clock_that_is_ahead_gives_no_head_to_come(later: KinesisStub) -> None:
    """`qdo seek QUEUE latest` records the head: messages sent after that are processed."""
    long_ago(later, 60)
    broker = opened(later.url, "s")
    broker.send(Outgoing(SHARD, b"before"))
    later.advance(2)
    head = broker.catalog.backlog(SHARD, 0).head
    later.advance(2)
    broker.send(Outgoing(SHARD, b"after"))
    owner = ShardOwner(
        broker, SHARD, broker.positions.resume_after(broker.positions.to_time(head), None)
    )
    assert owner.read_to_tip() == [b"after"]
    broker.close()


# --- lists --------------------------------------------------------------------------


def test_lists_of_shards_are_read_to_their_end(kinesis: KinesisStub, aws_stream: str) -> None:
    """Page by page."""
    kinesis.make(aws_stream, 25)
    kinesis.set(page=10)
    broker = opened(kinesis.url, aws_stream)
    assert len(broker.catalog.names()) == 25
    broker.close()
