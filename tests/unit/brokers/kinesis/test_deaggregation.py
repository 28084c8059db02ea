"""Messages that a producer library packed into one Kinesis record."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import gevent
import pytest
from aws_kinesis_agg.aggregator import RecordAggregator

from qdo.brokers.kinesis.api import GetIterator, GetRecords, StartPosition, parse_records
from qdo.brokers.kinesis.codec import hash_key, unpack
from qdo.brokers.kinesis.poller import ShardPoller
from qdo.encoding import unreadable_reason
from qdo.system import clock

EVERYTHING = (0, 2**128 - 1)


def packed(*messages: tuple[Any, ...]) -> bytes:
    """Return a record as AWS's module packs it."""
    aggregator = RecordAggregator()
    for message in messages:
        aggregator.add_user_record(*message)
    contents: bytes = aggregator.clear_and_get().get_contents()[2]
    return contents


def test_a_thousand_messages_fit_one_record() -> None:
    """Key tables are shared by the messages."""
    data = packed(*((f"k{number % 7}", b"%d" % number) for number in range(1000)))
    found = unpack(data, EVERYTHING)
    assert found is not None
    assert [each.data for each in found] == [b"%d" % number for number in range(1000)]
    assert [each.partition_key for each in found] == [f"k{number % 7}" for number in range(1000)]


@pytest.mark.parametrize("cut", [0, 3, 4, 5, 19, 20, 21, -1])
def test_what_is_not_whole_is_an_ordinary_record(cut: int) -> None:
    """The digest shows this."""
    assert unpack(packed(("a", b"1"))[:cut], EVERYTHING) is None


def test_a_record_that_only_begins_like_one_is_ordinary() -> None:
    """Its digest does not fit."""
    assert unpack(b"\xf3\x89\x9a\xc2" + b"x" * 40, EVERYTHING) is None
    assert unpack(b'{"n": 1}', EVERYTHING) is None


def sealed(inside: bytes) -> bytes:
    """Return a record with magic bytes and a right digest over anything."""
    return b"\xf3\x89\x9a\xc2" + inside + hashlib.md5(inside).digest()


def varint(number: int) -> bytes:
    """Return a number as Protocol Buffers write it."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, content: bytes) -> bytes:
    """Return a field with bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def one(key_index: int, more: bytes = b"") -> bytes:
    """Return a message that refers to a key."""
    return field(3, b"\x08" + varint(key_index) + more + b"\x1a\x011")


HOSTILE = {
    "not protobuf": b"\xff" * 30,
    "no key at all": one(0),
    "an index beyond": field(1, b"k") + one(1),
    "2^63": field(1, b"k") + one(2**63),
    "2^64 - 1": field(1, b"k") + one(2**64 - 1),
    "a key that is not UTF-8": field(1, b"\xff\xfe") + one(0),
    "a hash key that is not UTF-8": field(1, b"k") + field(2, b"\xff\xfe") + one(0, b"\x10\x00"),
    "a long key": field(1, b"k" * 257) + one(0),
    "a long hash key": field(1, b"k") + field(2, b"9" * 5000) + one(0, b"\x10\x00"),
    "a hash index beyond": field(1, b"k") + field(2, b"9") + one(0, b"\x10" + varint(2**63)),
    "too many messages": field(1, b"k") + 100_001 * field(3, b"\x08\x00\x1a\x00"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_producer_library_packs_is_refused(name: str) -> None:
    """The record says that it is an aggregated one: a worker learns why it is no message."""
    data = [b'{"n":1}', sealed(HOSTILE[name]), b'{"n":2}']
    for keys in (EVERYTHING, None):
        with pytest.raises(ValueError, match=r"."):
            unpack(data[1], keys)
    found = parse_records(answer(data), EVERYTHING)
    assert [row[1] for row in found.rows] == data
    reasons = [unreadable_reason(row[3]) for row in found.rows]
    assert [bool(reason) for reason in reasons] == [False, True, False]


def answer(data: list[bytes]) -> dict[str, Any]:
    """Return a response to GetRecords."""
    return {
        "Records": [
            {
                "SequenceNumber": str(number),
                "ApproximateArrivalTimestamp": 1_700_000_000.0,
                "Data": base64.b64encode(each).decode(),
                "PartitionKey": "k",
            }
            for number, each in enumerate(data, 1)
        ],
        "NextShardIterator": "next",
        "MillisBehindLatest": 0,
    }


def test_messages_share_the_text_of_their_key() -> None:
    """Every access to protobuf's table makes a new text."""
    found = unpack(sealed(field(1, b"k" * 256) + one(0) + one(0)), None)
    assert found is not None
    assert found[0].partition_key is found[1].partition_key


def test_a_response_takes_a_limited_amount_of_memory() -> None:
    """Records behind the limit are requested again, from the last record that was taken."""
    many = sealed(field(1, b"k") + 50_000 * field(3, b"\x08\x00\x1a\x011"))
    found = parse_records(answer([many, many, many]), EVERYTHING)
    assert (found.cut, found.records, len(found.rows)) == (True, 3, 100_000)
    poll = ShardPoller(0, StartPosition(), 1.0)
    poll.next(0.0)
    poll.iterator_received("first")
    poll.next(0.0)
    assert len(poll.records_received(found, 0.0)) == 100_000
    assert (poll.ended, poll.tip.reached) == (False, False)
    assert poll.next(0.0) == GetIterator("AT_SEQUENCE_NUMBER", sequence=2)
    poll.iterator_received("second")
    assert poll.next(0.0) == GetRecords("second", 1)


def test_other_greenlets_run_while_a_record_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """99,000 messages take up to a second of a worker's event loop, which serves other queues."""
    monkeypatch.setattr(clock, "time", gevent)  # as in a process that gevent has patched
    many = answer([sealed(field(1, b"k") + 99_000 * field(3, b"\x08\x00\x1a\x00"))])
    parsing = gevent.spawn(parse_records, many, EVERYTHING)
    turns = 0
    while not parsing.dead:
        turns += 1
        gevent.sleep(0)
    assert len(parsing.get().rows) == 99_000
    assert turns >= 2 * 99_000 // clock.STRIDE  # unpacked, and decoded


def test_the_hash_key_is_that_of_kinesis() -> None:
    """MD5 of the partition key as a number of 128 bits."""
    assert hash_key("a") == int("0cc175b9c0f1b6a831c399e269772661", 16)
