"""The shards of a stream as queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from qdo.brokers.catalog import Backlog, QueueCatalog
from qdo.brokers.kinesis.dead_letters import NO_STORE_REMEDY
from qdo.brokers.kinesis.peek import PeekReader
from qdo.brokers.kinesis.positions import CHILD_START, is_end
from qdo.brokers.kinesis.shards import Shards
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.jobs.policy import Policy


class KinesisCatalog(QueueCatalog):
    """Safe to use from several threads or greenlets.

    :param peek: opens a reader behind a position of a shard.
    :param own_backlog: returns the backlog of a shard that this process owns and reads, otherwise
        None.
    """

    def __init__(
        self,
        address: KinesisAddress,
        shards: Shards,
        peek: Callable[[str, int], PeekReader],
        own_backlog: Callable[[str, int], Backlog | None],
    ) -> None:
        # A start time holds for child shards too. "latest" skips only what a new app missed.
        self.child_start = CHILD_START if address.start == "latest" else 0
        self._address = address
        self._shards = shards
        self._peek = peek
        self._own_backlog = own_backlog

    def names(self) -> list[str]:
        return [shard.name for shard in self._shards.list()]

    def parents(self, queue: str) -> Sequence[str]:
        """Return the parent shards of a shard, expired ones included.

        :raises: as `names`.
        """
        return self._shards.parents(queue)

    def is_reopened(self, queue: str) -> bool:
        shard = self._shards.known(queue)
        return shard is not None and not shard.closed

    def has_position(self, queue: str, position: int) -> bool:
        """Return whether a shard has a record, or may have had one that has expired.

        Makes a few requests, which count toward the shard's read limit.
        """
        return self._shards.find(queue) is None or self._peek(queue, position).finds()

    def config_warnings(self, policies: Mapping[str, Policy]) -> list[str]:
        """Warn about a stream without a store for the dead letters of its policies."""
        if self._address.dead_letters is not None:
            return []
        if all(each.then != "dead-letter" for each in policies.values()):
            return []
        return [
            f"a message of stream {self._address.stream} that fails for the last time will block"
            f" its shard: there is no store for dead letters; {NO_STORE_REMEDY}"
        ]

    def head(self, queue: str) -> int:
        """Return the present time at Kinesis; reads no records."""
        return self._peek(queue, 0).head() if self._shards.find(queue) is not None else 0

    def backlog(self, queue: str, after: int) -> Backlog:
        """Return whether anything waits behind a position, and how old it is.

        `count` is 1 for any number; `head` is the present. Makes up to a few requests, which count
        toward the shard's read limit, unless this process owns and reads the shard.
        """
        found = self._own_backlog(queue, after)
        if found is not None:
            return found
        if is_end(after) or self._shards.find(queue) is None:
            return Backlog(0, None, 0, approximate=True, behind_seconds=0.0)
        peek = self._peek(queue, after)
        backlog = peek.look()
        if peek.gap is not None and self._address.trimmed == "stop":
            return replace(backlog, fault=str(peek.gap), lost=True)
        return backlog
