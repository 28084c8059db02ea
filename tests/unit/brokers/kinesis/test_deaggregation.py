"""Messages that a producer library packed into one Kinesis record."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from aws_kinesis_agg.aggregator import RecordAggregator

from qdo.brokers.kinesis.deaggregation import hash_key, is_aggregated, unpack

EVERYTHING = (0, 2**128 - 1)


def packed(*messages: tuple[Any, ...]) -> bytes:
    """Return a record as AWS's module packs it."""
    aggregator = RecordAggregator()
    for message in messages:
        aggregator.add_user_record(*message)
    contents: bytes = aggregator.clear_and_get().get_contents()[2]
    return contents


def test_what_a_producer_library_packs_is_unpacked_in_order() -> None:
    """Each message has its key and its number in the record."""
    data = packed(("a", b"1"), ("b", b"\x00\xff"), ("a", b""))
    assert is_aggregated(data)
    assert unpack(data, EVERYTHING) == [(0, "a", b"1"), (1, "b", b"\x00\xff"), (2, "a", b"")]


def test_a_thousand_messages_fit_one_record() -> None:
    """Key tables are shared by the messages."""
    data = packed(*((f"k{number % 7}", b"%d" % number) for number in range(1000)))
    found = unpack(data, EVERYTHING)
    assert found is not None
    assert [each.data for each in found] == [b"%d" % number for number in range(1000)]
    assert [each.partition_key for each in found] == [f"k{number % 7}" for number in range(1000)]


def test_messages_of_other_shards_are_dropped() -> None:
    """After a reshard their producer sends them again to the shard that they belong to."""
    data = packed(("here", b"1"), ("there", b"2"), ("here", b"3"), ("there", b"4", "7"))
    here = hash_key("here")
    assert unpack(data, (here, here)) == [(0, "here", b"1"), (2, "here", b"3")]
    assert unpack(data, (7, 7)) == [(3, "there", b"4")]
    assert unpack(data, (1, 2)) == []
    found = unpack(data, None)
    assert found is not None
    assert len(found) == 4


@pytest.mark.parametrize("cut", [0, 3, 4, 5, 19, 20, 21, -1])
def test_what_is_not_whole_is_an_ordinary_record(cut: int) -> None:
    """The digest shows this."""
    assert unpack(packed(("a", b"1"))[:cut], EVERYTHING) is None


def test_a_record_that_only_begins_like_one_is_ordinary() -> None:
    """Magic bytes and a right digest over something else."""
    for inside in (b"\xff" * 30, b"\x1a\x04\x08\x09\x1a\x00"):  # no message; an index beyond
        data = b"\xf3\x89\x9a\xc2" + inside + hashlib.md5(inside).digest()
        assert unpack(data, EVERYTHING) is None
    assert unpack(b'{"n": 1}', EVERYTHING) is None


@pytest.mark.parametrize(
    "inside",
    [
        b"\x0a\x02\xff\xfe\x1a\x05\x08\x00\x1a\x011",  # a key that is not UTF-8
        b"\x0a\x01k\x12\x02\xff\xfe\x1a\x07\x08\x00\x10\x00\x1a\x011",  # such a hash key
        b"\x0a\x01k\x12\x88\x27" + 5000 * b"9" + b"\x1a\x07\x08\x00\x10\x00\x1a\x011",  # a long one
    ],
)
@pytest.mark.parametrize("keys", [EVERYTHING, None])
def test_texts_that_no_producer_library_writes_hold_up_no_shard(
    inside: bytes, keys: tuple[int, int] | None
) -> None:
    """Such a record is an ordinary one, for the job and its policy to decide on."""
    data = b"\xf3\x89\x9a\xc2" + inside + hashlib.md5(inside).digest()
    assert unpack(data, keys) is None or (keys is None and len(inside) > 5000)


def test_the_hash_key_is_that_of_kinesis() -> None:
    """MD5 of the partition key as a number of 128 bits."""
    assert hash_key("a") == int("0cc175b9c0f1b6a831c399e269772661", 16)
