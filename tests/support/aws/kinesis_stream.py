"""Streams of Kinesis as values: shards, records, iterators, resharding. No I/O, no clock.

moto moves the records of a shard into its children at a split, copies them at a merge, and never
reports the end of a shard. Unlike moto, this module behaves like AWS.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

HASH_KEYS = 2**128
FIRST_SEQUENCE = 49590338271490256608559692538361571095921575989136588898
SEQUENCE_STEP = 4722366482869645213698
ITERATOR_SECONDS = 300.0
READS_PER_SECOND = 5
RECORD_BYTES = 1_048_576
CALL_BYTES = 10 * 1_048_576
ANSWER_BYTES = 10 * 1_048_576


class KinesisError(Exception):
    """An error response."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> KinesisError:
    return KinesisError("InvalidArgumentException", message)


@dataclass(frozen=True, slots=True)
class StreamRecord:
    sequence: int
    time: float
    data: str
    partition_key: str

    def shown(self) -> Json:
        return {
            "SequenceNumber": str(self.sequence),
            "ApproximateArrivalTimestamp": self.time,
            "Data": self.data,
            "PartitionKey": self.partition_key,
        }


@dataclass(slots=True)
class StubShard:
    """One shard.

    :ivar reads: times of the reads of the last second.
    """

    name: str
    first_key: int
    last_key: int
    born: int
    parents: list[str] = field(default_factory=list)
    records: list[StreamRecord] = field(default_factory=list)
    ended: int | None = None
    closed_at: float | None = None
    children: list[StubShard] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)

    def shown(self) -> Json:
        sequences = {"StartingSequenceNumber": str(self.born)}
        if self.ended is not None:
            sequences["EndingSequenceNumber"] = str(self.ended)
        found: Json = {
            "ShardId": self.name,
            "HashKeyRange": self.keys(),
            "SequenceNumberRange": sequences,
        }
        found.update(zip(("ParentShardId", "AdjacentParentShardId"), self.parents, strict=False))
        return found

    def keys(self) -> Json:
        return {"StartingHashKey": str(self.first_key), "EndingHashKey": str(self.last_key)}

    def as_child(self) -> Json:
        return {
            "ShardId": self.name,
            "ParentShards": self.parents,
            "HashKeyRange": self.keys(),
        }


class StubStream:
    """One stream."""

    def __init__(self, name: str, shards: int, now: float) -> None:
        self.name = name
        self.created = now
        self.retention_hours = 24
        self.record_kib: int | None = None
        self.shards: dict[str, StubShard] = {}
        self._sequence = FIRST_SEQUENCE
        self._made = 0
        step = HASH_KEYS // shards
        for number in range(shards):
            last = HASH_KEYS - 1 if number == shards - 1 else (number + 1) * step - 1
            self._add(number * step, last, [])

    def _add(self, first: int, last: int, parents: list[str]) -> StubShard:
        shard = StubShard(f"shardId-{self._made:012d}", first, last, self._next(), parents)
        self._made += 1  # not the number of shards: a shard without records is not listed
        self.shards[shard.name] = shard
        return shard

    def _next(self) -> int:
        self._sequence += SEQUENCE_STEP
        return self._sequence

    def trim(self, now: float) -> None:
        """Delete records that are older than the retention period."""
        kept_from = now - self.retention_hours * 3600
        for shard in list(self.shards.values()):
            shard.records = [record for record in shard.records if record.time >= kept_from]
            if shard.closed_at is not None and shard.closed_at < kept_from:
                del self.shards[shard.name]

    def shard(self, name: str) -> StubShard:
        if name not in self.shards:
            raise KinesisError(
                "ResourceNotFoundException",
                f"Shard {name} in stream {self.name} under account 123456789012 does not exist",
            )
        return self.shards[name]

    # --- writing

    def put(self, entry: Json, now: float) -> tuple[str, int]:
        """Store a record; return its shard and its number."""
        key = entry["PartitionKey"]
        stated = entry.get("ExplicitHashKey")
        digest = hashlib.md5(key.encode()).digest()
        hash_key = int(stated) if stated else int.from_bytes(digest, "big")
        shard = next(
            each
            for each in self.shards.values()
            if each.ended is None and each.first_key <= hash_key <= each.last_key
        )
        record = StreamRecord(self._next(), now, entry["Data"], key)
        shard.records.append(record)
        return shard.name, record.sequence

    def check_entry(self, entry: Json) -> int:
        """Return the size of a record; raise an error if it cannot be stored."""
        key = entry.get("PartitionKey", "")
        if not 1 <= len(key) <= 256:
            raise KinesisError("ValidationException", "partitionKey: 1 to 256 characters")
        size = len(b64decode(entry.get("Data", ""))) + len(key.encode())
        if size > (self.record_kib * 1024 if self.record_kib else RECORD_BYTES):
            raise KinesisError("ValidationException", "Member must have length less than allowed")
        return size

    # --- resharding

    def split(self, name: str, start: int, now: float) -> None:
        shard = self._open(name)
        if not shard.first_key < start <= shard.last_key:
            raise invalid("NewStartingHashKey is not within the shard")
        self._close(shard, now)
        for first, last in ((shard.first_key, start - 1), (start, shard.last_key)):
            shard.children.append(self._add(first, last, [name]))

    def merge(self, one: str, other: str, now: float) -> None:
        low, high = sorted((self._open(one), self._open(other)), key=lambda each: each.first_key)
        if low.last_key + 1 != high.first_key:
            raise invalid("the shards are not adjacent")
        for shard in (low, high):
            self._close(shard, now)
        child = self._add(low.first_key, high.last_key, [one, other])
        low.children.append(child)
        high.children.append(child)

    def _open(self, name: str) -> StubShard:
        shard = self.shard(name)
        if shard.ended is not None:
            raise invalid(f"{name} has already been merged or split")
        return shard

    def _close(self, shard: StubShard, now: float) -> None:
        shard.ended, shard.closed_at = self._next(), now

    # --- reading

    def iterator(self, asked: Json, now: float) -> str:
        """Return an iterator: the sequence number of the first record that it may return."""
        shard = self.shard(asked["ShardId"])
        return self._written(shard, self._first(shard, asked, now), now)

    def _first(self, shard: StubShard, asked: Json, now: float) -> int:
        kind = asked["ShardIteratorType"]
        if kind == "TRIM_HORIZON":
            return 0
        if kind == "LATEST":
            return self._sequence + 1
        if kind == "AT_TIMESTAMP":
            if asked["Timestamp"] > now:
                raise invalid("The timestampInMillis parameter cannot be in the future")
            later = (each.sequence for each in shard.records if each.time >= asked["Timestamp"])
            return next(later, self._sequence + 1)
        sequence = int(asked["StartingSequenceNumber"])
        if not shard.born <= sequence <= (shard.ended or self._sequence):
            raise invalid(f"StartingSequenceNumber {sequence} is invalid for {shard.name}")
        return sequence + (kind == "AFTER_SEQUENCE_NUMBER")

    def _written(self, shard: StubShard, first: int, now: float) -> str:
        text = json.dumps([self.name, shard.name, str(first), now])
        return b64encode(text.encode()).decode()

    def read(self, shard: StubShard, first: int, limit: int, now: float) -> Json:
        """Return records, and an iterator of the records after them."""
        waiting = [record for record in shard.records if record.sequence >= first]
        given: list[StreamRecord] = []
        size = 0
        for record in waiting[:limit]:
            size += len(record.data) * 3 // 4
            if given and size > ANSWER_BYTES:
                break
            given.append(record)
        left = waiting[len(given) :]
        answer: Json = {
            "Records": [record.shown() for record in given],
            "MillisBehindLatest": round((now - left[0].time) * 1000) if left else 0,
        }
        if shard.ended is not None and not left:
            answer["ChildShards"] = [child.as_child() for child in shard.children]
        else:
            behind = given[-1].sequence + 1 if given else first
            answer["NextShardIterator"] = self._written(shard, behind, now)
        return answer
