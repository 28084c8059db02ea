"""The shards of a stream, with their parents and ranges of hash keys.

Calls raise the errors of `qdo.brokers.aws.errors.translation`, such as AwsNotFoundError if the
stream does not exist.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdo.brokers.aws.errors import translate
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard."""

    name: str
    # The parents: one after a split, two after a merge, none for the first shards of a stream.
    # Expired parents stay listed here.
    parents: tuple[str, ...]
    # The first and last hash key of the shard's records.
    hash_keys: tuple[int, int]
    closed: bool


def shard_of(described: Mapping[str, Any]) -> Shard:
    named = (described.get("ParentShardId"), described.get("AdjacentParentShardId"))
    keys = described["HashKeyRange"]
    return Shard(
        name=str(described["ShardId"]),
        parents=tuple(str(parent) for parent in named if parent),
        hash_keys=(int(keys["StartingHashKey"]), int(keys["EndingHashKey"])),
        closed="EndingSequenceNumber" in described["SequenceNumberRange"],
    )


class Shards:
    """The shards of one stream, listed on demand. Safe to use from several threads."""

    def __init__(self, client: Any, address: KinesisAddress) -> None:
        self._client = client
        self._address = address
        self._known: dict[str, Shard] = {}
        self._stale = False
        self._lock = threading.Lock()

    def list(self) -> Sequence[Shard]:
        """Return all shards that contain or accept records."""
        # Kinesis lists a closed shard until all its records have expired.
        listed: list[Shard] = []
        call: dict[str, Any] = {
            "StreamName": self._address.stream,
            "ShardFilter": {"Type": "FROM_TRIM_HORIZON"},
        }
        while call:
            with translate(self._address.place, "stream", self._address.stream):
                answer = self._client.list_shards(**call)
            listed.extend(map(shard_of, answer["Shards"]))
            # The token implies the other parameters; Kinesis rejects calls with both.
            call = {"NextToken": answer["NextToken"]} if answer.get("NextToken") else {}
        with self._lock:
            self._known = {each.name: each for each in listed}
            self._stale = False
        return listed

    def find(self, name: str) -> Shard | None:
        """Return a shard, or None; list the shards again if the shard is unknown."""
        shard = self.known(name)
        if shard is None or self._stale:
            self.list()
            shard = self.known(name)
        return shard

    def is_listed(self, name: str) -> bool:
        """Ask Kinesis whether the stream has a shard now."""
        self.list()
        return self.known(name) is not None

    def known(self, name: str) -> Shard | None:
        """Return a shard from the last list, or None."""
        with self._lock:
            return self._known.get(name)

    def forget(self) -> None:
        """List the shards again at the next `find`."""
        with self._lock:
            self._stale = True

    def parents(self, name: str) -> tuple[str, ...]:
        shard = self.find(name)
        return () if shard is None else shard.parents

    def has_listed_parent(self, name: str) -> bool:
        """Return whether the shard is so recent that a parent still exists."""
        return any(self.known(parent) is not None for parent in self.parents(name))

    def open_one(self, name: str) -> Shard:
        """Return an open shard; raise UsageError if it is closed or does not exist."""
        shard = self.find(name)
        if shard is None:
            raise UsageError(
                reason=f"stream {self._address.stream!r} does not have a shard {name!r}; send to"
                f" {self._address.stream!r}, which chooses a shard by the key, or to a shard that"
                " `qdo queues` lists"
            )
        if shard.closed:
            stream = self._address.stream
            raise UsageError(
                reason=f"shard {name!r} of stream {stream!r} is closed, because it was split or"
                f" merged; send to {stream!r}, which chooses a shard by the key, or to one of its"
                " child shards"
            )
        return shard
