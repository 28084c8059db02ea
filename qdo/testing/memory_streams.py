"""The streams of an app in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.streams import (
    ShardMap,
    StreamShard,
    StreamStore,
    key_hash,
    keyless_error,
    merge,
    sealed_error,
    split,
    taken_error,
)
from qdo.queues import stream_named


class MemoryStreams(StreamStore):
    """The streams of one app. Safe to use from several threads.

    :param known: the shards, by queue.
    :param queues: the queues of the app, by name.
    :param make: adds a queue.
    """

    def __init__(
        self,
        known: dict[str, StreamShard],
        lock: AbstractContextManager[Any],
        queues: Mapping[str, Any],
        make: Callable[[str], object],
    ) -> None:
        super().__init__()
        self._known = known
        self._lock = lock
        self._queues = queues
        self._make = make

    def shards(self, stream: str | None = None) -> list[StreamShard]:
        with self._lock:
            return [each for each in self._known.values() if stream in (None, each.stream)]

    def resharded(self) -> list[StreamShard]:
        with self._lock:
            streams = {each.stream for each in self._known.values() if each.hidden}
            return [each for each in self._known.values() if each.stream in streams]

    def add(self, shards: Sequence[StreamShard]) -> None:
        with self._lock:
            parents = shards[0].parents
            if not parents and self.shards(shards[0].stream):
                return
            for parent in parents:
                if parent not in self._known or self._known[parent].end is not None:
                    raise sealed_error(parent)
            for each in shards:
                if each.queue in self._queues:
                    raise taken_error(each.queue)
            for parent in parents:
                self._known[parent] = replace(self._known[parent], end=self._queues[parent].head)
            for each in shards:
                self._known[each.queue] = each
                self._make(each.queue)

    def open(self, queues: Collection[str]) -> None:
        with self._lock:
            for queue in queues:
                self._known[queue] = replace(self._known[queue], hidden=False)


def routed(
    known: Mapping[str, StreamShard], queues: Collection[str], message: Outgoing
) -> Outgoing:
    """Return a message for the open shard of its key, if its queue is, or may be, a shard."""
    stream = stream_named(message.queue)
    if stream is None or (message.queue in queues and message.queue not in known):
        return message
    opened = [each for each in known.values() if each.stream == stream and each.end is None]
    if not opened:
        return message
    if message.key is None:
        raise keyless_error(message.queue)
    found = ShardMap.of((each.low, each.queue) for each in opened)
    return replace(message, queue=found.queue_of(message.key))


def dedup_place(known: Mapping[str, StreamShard], message: Outgoing) -> tuple[str, str]:
    """Return the queue that keeps a message's deduplication keys, and what goes before them."""
    shard = known.get(message.queue)
    if shard is None or message.key is None:
        return message.queue, ""
    first = next(each.queue for each in known.values() if each.stream == shard.stream)
    return first, key_hash(message.key)


class KitStreams:
    """The shards of an app under test, as `qdo streams` divides those of a fleet."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store

    def split(self, shard: str, at: str | None = None) -> list[str]:
        """Divide a shard of a stream, like `qdo streams split`; return the names of its children.

        >>> kit.streams.split("user.40-80", at="60")
        ['user.40-60', 'user.60-80']

        :raises UsageError: the bound is not within the shard.
        :raises ShardStateError: the shard is sealed.
        :raises NotFoundError: no stream has the shard.
        """
        return self._reshard(split(self._store.shards(), shard, at))

    def merge(self, *shards: str) -> str:
        """Let neighbors of a stream become one, like `qdo streams merge`; return its name.

        :raises UsageError: they are not neighbors.
        :raises ShardStateError: one of them is sealed.
        :raises NotFoundError: no stream has one of them.
        """
        return self._reshard(merge(self._store.shards(), *shards))[0]

    def _reshard(self, children: list[StreamShard]) -> list[str]:
        self._store.add(children)
        return [each.queue for each in children]
