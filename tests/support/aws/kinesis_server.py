"""A fast server that speaks Kinesis's protocol: ``python -m tests.support.aws.kinesis_server``.

It prints its address, rejects the same requests as AWS (more than five reads per second of a
shard, old iterators, too much at once), and keeps closed shards with their records. Control
requests in JSON:

- ``POST /_set`` with `iterator_seconds`, `reads_per_second`, `empty` (number of empty responses
  before the records of an iterator), `page` (shards per ListShards response), `retention_hours`,
  `record_kib`;
- ``POST /_advance`` with `seconds`: advance the clock;
- ``POST /_refuse`` with `seed` and `share`: reject this share of the records of each PutRecords;
- ``GET /_log``: reads as [time, stream, shard, records], and requests by action.

Tests use it as `KinesisStub`, by `kinesis_stub`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import ujson

from tests.support.aws import http1
from tests.support.aws.clients import client
from tests.support.aws.http1 import Connection, HttpRequest
from tests.support.aws.kinesis_stream import (
    CALL_BYTES,
    ITERATOR_SECONDS,
    READS_PER_SECOND,
    Json,
    KinesisError,
    StubStream,
    invalid,
)
from tests.support.aws.server_process import ServerProcess, serving

_TARGET = re.compile(rb"\r\nx-amz-target:[ \t]*Kinesis_20131202\.(\w+)", re.IGNORECASE)
_KIND = "application/x-amz-json-1.1"


class KinesisServer:
    """The server in its process."""

    def __init__(self) -> None:
        self.connections: set[Connection] = set()
        self._streams: dict[str, StubStream] = {}
        self._ahead = 0.0
        self._iterator_seconds = ITERATOR_SECONDS
        self._reads_per_second: float = READS_PER_SECOND
        self._empty = 0
        self._empty_left: Counter[str] = Counter()
        self._page = 1000
        self._dice = random.Random(0)
        self._share = 0.0
        self._reads: list[tuple[float, str, str, int]] = []
        self._requests: Counter[str] = Counter()
        self._actions: dict[str, Callable[[Json], Json]] = {
            "CreateStream": self.create,
            "DeleteStream": self.delete,
            "DescribeStreamSummary": self.describe,
            "ListShards": self.list,
            "PutRecord": self.put,
            "PutRecords": self.put_many,
            "GetShardIterator": self.iterate,
            "GetRecords": self.read,
            "SplitShard": self.split,
            "MergeShards": self.merge,
        }

    def now(self) -> float:
        return time.time() + self._ahead

    def handle(self, request: HttpRequest) -> None:
        target = _TARGET.search(request.head)
        if target is None:
            self._administer(request)
            return
        action = target[1].decode()
        self._requests[action] += 1
        try:
            answer = self._actions[action](ujson.loads(request.body))
            date = f"Date: {formatdate(self.now(), usegmt=True)}\r\n"
            request.reply(200, ujson.dumps(answer).encode(), _KIND, date)
        except KinesisError as error:
            said = {"__type": error.code, "message": error.message}
            request.reply(400, ujson.dumps(said).encode(), _KIND)

    # --- actions

    def _stream(self, asked: Json) -> StubStream:
        name = asked.get("StreamName", "")
        if name not in self._streams:
            raise KinesisError(
                "ResourceNotFoundException",
                f"Stream {name} under account 123456789012 not found.",
            )
        self._streams[name].trim(self.now())
        return self._streams[name]

    def create(self, asked: Json) -> Json:
        name = asked["StreamName"]
        self._streams[name] = StubStream(name, asked.get("ShardCount", 1), self.now())
        return {}

    def delete(self, asked: Json) -> Json:
        name = self._stream(asked).name
        del self._streams[name]
        self._reads = [each for each in self._reads if each[1] != name]
        return {}

    def describe(self, asked: Json) -> Json:
        stream = self._stream(asked)
        said: Json = {
            "StreamName": stream.name,
            "StreamARN": f"arn:aws:kinesis:us-east-1:123456789012:stream/{stream.name}",
            "StreamStatus": "ACTIVE",
            "RetentionPeriodHours": stream.retention_hours,
            "StreamCreationTimestamp": stream.created,
            "EnhancedMonitoring": [],
            "OpenShardCount": sum(each.ended is None for each in stream.shards.values()),
        }
        if stream.record_kib:
            said["MaxRecordSizeInKiB"] = stream.record_kib
        return {"StreamDescriptionSummary": said}

    def list(self, asked: Json) -> Json:
        token = asked.get("NextToken")
        if token and "StreamName" in asked:
            raise invalid("NextToken and StreamName cannot be provided together.")
        name, start = json.loads(token) if token else (asked["StreamName"], 0)
        shards = list(self._stream({"StreamName": name}).shards.values())
        answer: Json = {"Shards": [each.shown() for each in shards[start : start + self._page]]}
        if start + self._page < len(shards):
            answer["NextToken"] = json.dumps([name, start + self._page])
        return answer

    def put(self, asked: Json) -> Json:
        stream = self._stream(asked)
        stream.check_entry(asked)
        shard, sequence = stream.put(asked, self.now())
        return {"ShardId": shard, "SequenceNumber": str(sequence)}

    def put_many(self, asked: Json) -> Json:
        stream = self._stream(asked)
        entries = asked["Records"]
        if not 1 <= len(entries) <= 500:
            raise KinesisError("ValidationException", "records: 1 to 500")
        if sum(map(stream.check_entry, entries)) > CALL_BYTES:
            raise invalid("Records size exceeds the limit")
        answers = [self._put_one(stream, entry) for entry in entries]
        failed = sum("ErrorCode" in each for each in answers)
        return {"FailedRecordCount": failed, "Records": answers}

    def _put_one(self, stream: StubStream, entry: Json) -> Json:
        if self._dice.random() < self._share:
            code = self._dice.choice(["ProvisionedThroughputExceededException", "InternalFailure"])
            return {"ErrorCode": code, "ErrorMessage": "refused by the test"}
        shard, sequence = stream.put(entry, self.now())
        return {"ShardId": shard, "SequenceNumber": str(sequence)}

    def split(self, asked: Json) -> Json:
        start = int(asked["NewStartingHashKey"])
        self._stream(asked).split(asked["ShardToSplit"], start, self.now())
        return {}

    def merge(self, asked: Json) -> Json:
        stream = self._stream(asked)
        stream.merge(asked["ShardToMerge"], asked["AdjacentShardToMerge"], self.now())
        return {}

    def iterate(self, asked: Json) -> Json:
        found = self._stream(asked).iterator(asked, self.now())
        self._empty_left[found] = self._empty
        return {"ShardIterator": found}

    def read(self, asked: Json) -> Json:
        iterator = asked["ShardIterator"]
        name, shard_name, first, made = json.loads(b64decode(iterator))
        stream = self._stream({"StreamName": name})
        shard, now = stream.shard(shard_name), self.now()
        shard.reads = [each for each in shard.reads if each > now - 1.0]
        if len(shard.reads) >= self._reads_per_second:
            raise KinesisError("ProvisionedThroughputExceededException", "Rate exceeded for shard")
        shard.reads.append(now)
        if now - made > self._iterator_seconds:
            raise KinesisError("ExpiredIteratorException", "Iterator expired.")
        empty = self._empty_left.pop(iterator, 0)
        limit = 0 if empty else asked.get("Limit", 10_000)
        answer = stream.read(shard, int(first), limit, now)
        if empty and "NextShardIterator" in answer:
            self._empty_left[answer["NextShardIterator"]] = empty - 1
            answer["MillisBehindLatest"] = max(1000, answer["MillisBehindLatest"])
        self._reads.append((time.time(), name, shard_name, len(answer["Records"])))
        return answer

    # --- control requests

    def _administer(self, request: HttpRequest) -> None:
        asked = ujson.loads(request.body) if request.body else {}
        answer: Json = {}
        if request.path == "/_set":
            self._set(asked)
        elif request.path == "/_advance":
            self._ahead += float(asked["seconds"])
        elif request.path == "/_refuse":
            self._dice, self._share = random.Random(asked["seed"]), float(asked["share"])
        elif request.path == "/_log":
            answer = {"reads": self._reads, "requests": self._requests}
        else:
            request.reply(404, b"{}")
            return
        request.reply(200, ujson.dumps(answer).encode())

    def _set(self, asked: Json) -> None:
        self._iterator_seconds = asked.get("iterator_seconds", self._iterator_seconds)
        self._reads_per_second = asked.get("reads_per_second", self._reads_per_second)
        self._empty = asked.get("empty", self._empty)
        self._page = asked.get("page", self._page)
        for stream in self._streams.values():
            stream.retention_hours = asked.get("retention_hours", stream.retention_hours)
            stream.record_kib = asked.get("record_kib", stream.record_kib)


# --- for tests


class KinesisStub:
    """A client of a running stub, for tests."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self.url = process.url
        self._ahead = 0.0
        self.client = client("kinesis", process.url)

    def set(self, **terms: float) -> None:
        """Change its behavior; see the module."""
        self._process.ask("/_set", terms)

    def reset(self) -> None:
        """Restore the behavior of AWS and its clock; streams stay."""
        self.set(
            iterator_seconds=ITERATOR_SECONDS,
            reads_per_second=READS_PER_SECOND,
            empty=0,
            page=1000,
        )
        self.refuse(0.0)
        self.advance(-self._ahead)

    def make(self, stream: str, shards: int = 1) -> list[str]:
        """Create a stream; return its shards."""
        self.client.create_stream(StreamName=stream, ShardCount=shards)
        return sorted(self.shards(stream))

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self._ahead += seconds
        self._process.ask("/_advance", {"seconds": seconds})

    def refuse(self, share: float, seed: int = 1) -> None:
        """Reject a share of the records of each PutRecords."""
        self._process.ask("/_refuse", {"share": share, "seed": seed})

    def reads(self, stream: str, shard: str) -> list[tuple[float, int]]:
        """Return time and records of each answered read of a shard."""
        return [
            (at, count)
            for at, of, name, count in self._process.ask("/_log")["reads"]
            if (of, name) == (stream, shard)
        ]

    def requests(self) -> dict[str, int]:
        """Return the number of requests of each action."""
        found: dict[str, int] = self._process.ask("/_log")["requests"]
        return found

    def shards(self, stream: str) -> dict[str, Any]:
        """Return the shards of ListShards by name."""
        listed = self.client.list_shards(StreamName=stream)["Shards"]
        return {each["ShardId"]: each for each in listed}

    def split(self, stream: str, shard: str) -> None:
        """Split a shard into two halves."""
        keys = self.shards(stream)[shard]["HashKeyRange"]
        middle = (int(keys["StartingHashKey"]) + int(keys["EndingHashKey"]) + 1) // 2
        self.client.split_shard(
            StreamName=stream, ShardToSplit=shard, NewStartingHashKey=str(middle)
        )

    def merge(self, stream: str, one: str, other: str) -> None:
        """Merge two shards."""
        self.client.merge_shards(StreamName=stream, ShardToMerge=one, AdjacentShardToMerge=other)


@contextlib.contextmanager
def kinesis_stub() -> Iterator[KinesisStub]:
    """Run a stub during the block."""
    with serving("tests.support.aws.kinesis_server") as process:
        stub = KinesisStub(process)
        try:
            yield stub
        finally:
            stub.client.close()


async def run(port: int) -> None:
    """Serve until the process is ended."""
    stub = KinesisServer()
    forever = await http1.serve(stub.handle, stub.connections, port)
    await forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aws.kinesis_server")
    parser.add_argument("--port", type=int, default=0, help="on loopback; 0 for a free one")
    asyncio.run(run(parser.parse_args().port))


if __name__ == "__main__":
    main()
