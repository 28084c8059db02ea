"""The streams of an app in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.streams import (
    Shard,
    StreamStore,
    key_hash,
    keyless_error,
    sealed_error,
    taken_error,
)


class MemoryStreams(StreamStore):
    """The streams of one app. Safe to use from several threads.

    :param known: the shards, by queue.
    :param queues: the queues of the app, by name.
    :param make: adds a queue.
    """

    def __init__(
        self,
        known: dict[str, Shard],
        lock: AbstractContextManager[Any],
        queues: Mapping[str, Any],
        make: Callable[[str], object],
    ) -> None:
        self._known = known
        self._lock = lock
        self._queues = queues
        self._make = make

    def shards(self, stream: str | None = None) -> list[Shard]:
        with self._lock:
            return [each for each in self._known.values() if stream in (None, each.stream)]

    def resharded(self) -> list[Shard]:
        with self._lock:
            streams = {each.stream for each in self._known.values() if each.hidden}
            return [each for each in self._known.values() if each.stream in streams]

    def add(self, shards: Sequence[Shard]) -> None:
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


def routed(known: Mapping[str, Shard], message: Outgoing) -> Outgoing:
    """Return a message for the open shard of its key, if its queue is a sealed one."""
    shard = known.get(message.queue)
    if shard is None:
        return message
    if message.key is None:
        raise keyless_error(message.queue)
    if shard.end is None:
        return message
    heirs = (each for each in known.values() if each.stream == shard.stream and each.end is None)
    hashed = key_hash(message.key)
    return replace(message, queue=next(each.queue for each in heirs if each.has(hashed)))


def dedup_place(known: Mapping[str, Shard], message: Outgoing) -> tuple[str, str]:
    """Return the queue that keeps a message's deduplication keys, and what goes before them."""
    shard = known.get(message.queue)
    if shard is None or message.key is None:
        return message.queue, ""
    first = next(each.queue for each in known.values() if each.stream == shard.stream)
    return first, key_hash(message.key)
