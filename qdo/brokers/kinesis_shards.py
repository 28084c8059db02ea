"""The shards of a stream: which there are, which came out of which, and where hash keys belong."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdo.brokers.aws_address import KinesisAddress
from qdo.brokers.aws_errors import translated
from qdo.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard.

    :ivar parents: one after a split, two after a merge, none for those a stream began with. They
        stay named when they have expired.
    :ivar hash_keys: first and last hash key of the records that go here.
    :ivar closed: nothing can be added to it any more.
    """

    name: str
    parents: tuple[str, ...]
    hash_keys: tuple[int, int]
    closed: bool


def shard_of(described: Mapping[str, Any]) -> Shard:
    """Return a shard as ListShards describes it."""
    named = (described.get("ParentShardId"), described.get("AdjacentParentShardId"))
    keys = described["HashKeyRange"]
    return Shard(
        name=str(described["ShardId"]),
        parents=tuple(str(parent) for parent in named if parent),
        hash_keys=(int(keys["StartingHashKey"]), int(keys["EndingHashKey"])),
        closed="EndingSequenceNumber" in described["SequenceNumberRange"],
    )


def heir(shards: Iterable[Shard], hash_key: int) -> Shard | None:
    """Return the open shard that takes records with this hash key."""
    found = (
        each
        for each in shards
        if not each.closed and each.hash_keys[0] <= hash_key <= each.hash_keys[1]
    )
    return next(found, None)


class Shards:
    """The shards of one stream, listed when they are asked for. Safe to use from several threads.

    :param client: of boto3.
    """

    def __init__(self, client: Any, address: KinesisAddress) -> None:
        self._client = client
        self._address = address
        self._known: dict[str, Shard] = {}
        self._stale = False
        self._lock = threading.Lock()

    def list(self) -> Sequence[Shard]:
        """Ask for all shards that hold records or can take them.

        Closed ones are listed as long as the stream keeps what is in them.

        :raises AwsNotFoundError: there is no such stream.
        :raises QdoError: see `aws_errors.translation`.
        """
        listed: list[Shard] = []
        request: dict[str, Any] = {
            "StreamName": self._address.stream,
            "ShardFilter": {"Type": "FROM_TRIM_HORIZON"},
        }
        while request:
            with translated(self._address.place, "stream", self._address.stream):
                answer = self._client.list_shards(**request)
            listed.extend(map(shard_of, answer["Shards"]))
            # The token stands for everything that was asked first: both together are refused.
            request = {"NextToken": answer["NextToken"]} if answer.get("NextToken") else {}
        with self._lock:
            self._known = {each.name: each for each in listed}
            self._stale = False
        return listed

    def find(self, name: str) -> Shard | None:
        """Return a shard, None where there is none (any more); asks where it is not known."""
        shard = self.known(name)
        if shard is None or self._stale:
            self.list()
            shard = self.known(name)
        return shard

    def is_listed(self, name: str) -> bool:
        """Ask whether the stream has a shard at present.

        :raises: as `list`.
        """
        self.list()
        return self.known(name) is not None

    def known(self, name: str) -> Shard | None:
        """Return a shard as it was listed last, None where it was not."""
        with self._lock:
            return self._known.get(name)

    def forget(self) -> None:
        """Have shards listed anew when one is asked for."""
        with self._lock:
            self._stale = True

    def parents(self, name: str) -> tuple[str, ...]:
        """Return what a shard came out of.

        :raises: as `list`.
        """
        shard = self.find(name)
        return () if shard is None else shard.parents

    def has_listed_parent(self, name: str) -> bool:
        """Return whether a shard came out of one that is still kept: it began not long ago.

        :raises: as `list`.
        """
        return any(self.known(parent) is not None for parent in self.parents(name))

    def open_one(self, name: str) -> Shard:
        """Return a shard that is to take records.

        :raises UsageError: it is closed, or there is none.
        :raises: as `list`.
        """
        shard = self.find(name)
        if shard is None:
            raise UsageError(
                reason=f"stream {self._address.stream!r} has no shard {name!r}: send to"
                f" {self._address.stream!r}, which finds a shard by the key, or to a shard that"
                " `qdo queues` lists"
            )
        if shard.closed:
            raise closed_error(self._address.stream, name)
        return shard


def closed_error(stream: str, name: str) -> UsageError:
    """Return the error of sending to a shard that takes no more records."""
    return UsageError(
        reason=f"shard {name!r} of stream {stream!r} is closed, it was split or merged: send to"
        f" {stream!r}, which finds a shard by the key, or to one of its children"
    )
