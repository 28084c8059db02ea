"""Streams: queues that divide the range of keys, and that operators can split at any time.

A *shard* is a queue of a stream, for all keys with hashes in the shard's range.

=======  ==========================================  ==============================================
shard    meaning                                     next
=======  ==========================================  ==============================================
hidden   it gets messages, and no worker sees it:    open (all its parents are done), sealed
         a parent is not done
open     it gets messages, and has an owner          sealed (a split or merge)
sealed   it gets no more messages; the messages of   deleted, by an operator
         its keys go to its children
=======  ==========================================  ==============================================

One transaction seals the parents and adds their children, which have the same keys. The transaction
that stores a message finds the shard of its key, because a sender may name a sealed shard. A parent
is done when it is not hidden and its recorded `last` has reached its end. So the messages of a key
start in the order in which the broker stored them, across all shards.

A range is ``low <= hash < high``. Hashes have 16 hexadecimal digits. As in Vitess, bounds are
prefixes of hashes, so qdo compares both as texts. "" is both the bound before the first hash and
the bound after the last hash.
"""

from __future__ import annotations

import abc
import hashlib
import re
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from qdo.errors import NotFoundError, ShardStateError, UsageError
from qdo.queues import check_queue_name, stream_named

MAX_SHARDS = 4096
# The time for which a process remembers that a queue with a shard-like name is not a shard.
PLAIN_SECONDS = 5.0
MOST_PLAIN = 10_000
DIGITS = 16
_BOUND = re.compile(r"[0-9a-f]{1,16}")


def key_hash(key: str) -> str:
    """Return the hash of a key, 16 digits of its SHA-256; brokers compute the same hash."""
    return hashlib.sha256(key.encode()).hexdigest()[:DIGITS]


@dataclass(frozen=True, slots=True)
class StreamShard:
    """A stored shard."""

    stream: str
    queue: str
    # The prefix of the first hash in the range; "" for the first range.
    low: str
    # The prefix of the first hash after the range; "" for the last range.
    high: str
    # The shards from which this shard took over keys.
    parents: tuple[str, ...] = ()
    # The position of the last message of a sealed shard; 0 if it is empty, None if it is not
    # sealed.
    end: int | None = None
    hidden: bool = False

    @property
    def state(self) -> str:
        return "sealed" if self.end is not None else "hidden" if self.hidden else "open"

    def has(self, hashed: str) -> bool:
        return self.low <= hashed and (not self.high or hashed < self.high)

    def check_open(self) -> None:
        if self.end is not None:
            raise sealed_error(self.queue)


class ShardMap(NamedTuple):
    """The open and hidden shards of a stream, in the order of their ranges."""

    lows: list[str]
    queues: list[str]

    @classmethod
    def of(cls, shards: Iterable[tuple[str, str]]) -> ShardMap:
        known = sorted(shards)
        return cls([low for low, _ in known], [queue for _, queue in known])

    def queue_of(self, key: str) -> str:
        return self.queues[bisect_right(self.lows, key_hash(key)) - 1]


def sealed_error(queue: str) -> ShardStateError:
    remedy = f"`qdo streams list {stream_named(queue)}` shows the open ones"
    return ShardStateError(queue=queue, state="is a sealed shard", remedy=remedy)


def taken_error(queue: str) -> ShardStateError:
    """Return the error if an ordinary queue already has the name of a shard."""
    remedy = "delete that queue, or divide the stream at another bound"
    return ShardStateError(queue=queue, state="exists, but is not a shard", remedy=remedy)


class StreamStore(abc.ABC):
    """The streams of an app. Each abstract method is one transaction."""

    def __init__(self) -> None:
        self._streams: dict[str, str] = {}
        self._plain: dict[str, float] = {}

    def stream_of(self, queue: str) -> str:
        """Return the stream of a shard, even a deleted one, and the name of any other queue."""
        stream = stream_named(queue)
        now = time.monotonic()
        if stream is None:
            return queue
        if queue not in self._streams and self._plain.get(queue, 0.0) <= now:
            self._streams |= {each.queue: each.stream for each in self.shards(stream)}
            if queue not in self._streams:
                if len(self._plain) >= MOST_PLAIN:
                    self._plain.clear()
                self._plain[queue] = now + PLAIN_SECONDS
        return self._streams.get(queue, queue)

    @abc.abstractmethod
    def shards(self, stream: str | None = None) -> list[StreamShard]:
        """Return all present and past shards of one or all streams, in the order of creation."""

    @abc.abstractmethod
    def resharded(self) -> list[StreamShard]:
        """Return every shard of the streams that have hidden shards."""

    @abc.abstractmethod
    def add(self, shards: Sequence[StreamShard]) -> None:
        """Store the first shards of a new stream, or seal parents and store their children.

        :param shards: the new shards, which have the same stream and parents.
        :raises ShardStateError: a parent is sealed, or a queue has the name of a new shard. The
            call has no effect.
        :raises QueueLimitError: the app would exceed its maximum number of queues.
        """

    @abc.abstractmethod
    def open(self, queues: Collection[str]) -> None:
        """Show hidden shards to workers. Idempotent."""


def check_stream_name(name: str) -> str:
    """Return the name of a stream; raise UsageError or QueueNameError if it is invalid."""
    if "." in check_queue_name(name):
        raise UsageError(reason=f"the name of a stream must not contain '.', got {name!r}")
    return name


def first_shards(stream: str, count: Any) -> list[StreamShard]:
    """Return the shards of a new stream, with ranges of the same size.

    >>> [each.queue for each in first_shards("user", 2)]
    ['user.-80', 'user.80-']
    """
    if type(count) is not int or not 0 < count <= MAX_SHARDS or count & (count - 1):
        rule = f"a power of two from 1 to {MAX_SHARDS}"
        raise UsageError(reason=f"shards must be {rule}, got {count!r}")
    step = 16**DIGITS // count
    bounds = ["", *(_shortened(f"{step * each:0{DIGITS}x}") for each in range(1, count)), ""]
    check_stream_name(stream)
    return [_shard(stream, *each, ()) for each in pairwise(bounds)]


def split(shards: Sequence[StreamShard], queue: str, at: str | None = None) -> list[StreamShard]:
    """Return the children for splitting a shard; see `StreamStore.add`.

    :param shards: all shards of the stream.
    :param at: the bound between the children; None: the middle of the range.
    :raises UsageError, ShardStateError: `at` is not a bound within the shard, or the shard is
        sealed.
    """
    parent = find_shard(shards, queue)
    parent.check_open()
    low = int(_full(parent.low), 16)
    high = int(_full(parent.high), 16)
    middle = f"{(low + (high if parent.high else 16**DIGITS)) // 2:0{DIGITS}x}"
    bound = _shortened(middle) if at is None else checked_bound(at)
    if not bound or not parent.low < bound or not (not parent.high or bound < parent.high):
        rule = f"between {parent.low or '0'} and {parent.high or 'f' * DIGITS}, and neither of them"
        raise UsageError(reason=f"the bound that splits shard {queue} must be {rule}, got {at!r}")
    ranges = (parent.low, bound), (bound, parent.high)
    return _named(shards, [_shard(parent.stream, *each, (queue,)) for each in ranges])


def merge(shards: Sequence[StreamShard], *queues: str) -> list[StreamShard]:
    """Return the child for merging shards; see `StreamStore.add`.

    :raises UsageError, ShardStateError: the shards are not neighbors, or one of them is sealed.
    """
    parents = sorted((find_shard(shards, each) for each in {*queues}), key=lambda each: each.low)
    for each in parents:
        each.check_open()
    met = all(
        one.stream == other.stream and one.high == other.low for one, other in pairwise(parents)
    )
    if len(parents) < 2 or not met:
        ranges = ", ".join(each.queue for each in parents)
        raise UsageError(reason=f"shards to merge must be two or more neighbors, got {ranges}")
    names = tuple(each.queue for each in parents)
    return _named(shards, [_shard(parents[0].stream, parents[0].low, parents[-1].high, names)])


def check_ranges(shards: Sequence[StreamShard]) -> None:
    """Raise ShardStateError unless each key belongs to exactly one shard of a stream."""
    # Ranges may be wrong, because earlier versions let senders with SQL choose the ranges.
    known = sorted((each for each in shards if each.end is None), key=lambda each: each.low)
    ends = ["", *(each.high or "-" for each in known)]
    wrong = [
        each
        for each, end in zip(known, ends, strict=False)
        if each.low != end or not all(map(_BOUND.fullmatch, filter(None, (each.low, each.high))))
    ]
    if wrong or ends[-1] != "-":
        names = [each.queue for each in wrong or known[-1:] or shards]
        state = f"is among the shards with wrong ranges, {', '.join(names)}"
        remedy = (
            "correct their rows in the broker's table `streams`, so that each key has one shard"
        )
        raise ShardStateError(queue=names[0], state=state, remedy=remedy)


def find_shard(shards: Iterable[StreamShard], queue: str) -> StreamShard:
    for each in shards:
        if each.queue == queue:
            return each
    raise NotFoundError(what="shard", name=queue)


def keyless_error(queue: str) -> UsageError:
    reason = f"a message for {queue}, a shard of a stream, must have a key, got none; send it with"
    return UsageError(reason=f"{reason} App.stream({stream_named(queue)!r}).send(key, body)")


def check_deletable(queue: str, streams: StreamStore) -> None:
    """Raise ShardStateError if a shard accepts messages, or other shards wait for its end."""
    for each in streams.shards(streams.stream_of(queue)):
        if each.queue == queue and each.end is None:
            remedy = "merge it with a neighbor, and delete it once it is done"
            raise ShardStateError(queue=queue, state="is a shard that gets messages", remedy=remedy)
        if each.hidden and queue in each.parents:
            state = f"is a shard whose end {each.queue} waits for"
            raise ShardStateError(queue=queue, state=state, remedy="delete it once it is done")


def checked_bound(text: Any) -> str:
    """Return a bound in its shortest form; raise UsageError for an invalid bound."""
    text = text.lower() if isinstance(text, str) else text
    if not isinstance(text, str) or not _BOUND.fullmatch(text):
        rule = f"1 to {DIGITS} hexadecimal digits"
        raise UsageError(reason=f"a bound must be {rule}, got {text!r:.60}")
    return _shortened(text)


def has_heirs(shards: Iterable[StreamShard], queue: str) -> bool:
    """Return whether workers may have begun with the children of a shard."""
    return any(queue in each.parents and not each.hidden for each in shards)


def are_done(shard: StreamShard, known: Mapping[str, StreamShard], last: Mapping[str, int]) -> bool:
    """Return whether the parents of a hidden shard are done, and a worker may open the shard.

    :param known: the parents by queue.
    :param last: the recorded `last` by queue.
    """
    # A hidden parent is not done, even if it is empty, because its own parents may have messages.
    parents = [known.get(name, shard) for name in shard.parents]
    return not any(
        each.hidden or each.end is None or last.get(each.queue, 0) < each.end for each in parents
    )


def _shard(stream: str, low: str, high: str, parents: tuple[str, ...]) -> StreamShard:
    queue = check_queue_name(f"{stream}.{low}-{high}")
    return StreamShard(stream, queue, low, high, parents, None, bool(parents))


def _named(shards: Iterable[StreamShard], children: list[StreamShard]) -> list[StreamShard]:
    """Return children with unused names, because queue nodes of old shards keep their names."""
    used = {each.queue for each in shards}
    named = []
    for child in children:
        name = child.queue
        number = 1
        while name in used:
            number += 1
            name = f"{child.queue}.{number}"
        named.append(replace(child, queue=name))
    return named


def _full(bound: str) -> str:
    return bound.ljust(DIGITS, "0")


def _shortened(bound: str) -> str:
    """Return a bound's shortest form with an even number of digits; "" for the first bound."""
    digits = bound.rstrip("0")
    return digits + "0" * (len(digits) % 2)
