"""The Kinesis broker: one stream, in which each shard is a queue.

The name of a queue is a ShardId, and its position is the sequence number of the last done record.
Only the queue node stores the position, so qdo needs no table or agent. After a reshard, workers
begin a child shard when they have finished its parents.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from qdo.brokers.aws.broker import CLOSE_SECONDS, AwsBroker
from qdo.brokers.aws.clients import make_calls, make_client
from qdo.brokers.base import Capabilities, Outgoing, Reader, Subscription
from qdo.brokers.catalog import Backlog, QueueCatalog
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.kinesis.api import (
    METHODS,
    SEEKERS,
    TARGET,
    KinesisApi,
    ShardReadLimiter,
    StartPosition,
)
from qdo.brokers.kinesis.codec import MAX_BODY_BYTES
from qdo.brokers.kinesis.dead_letters import NO_STORE_REMEDY, KinesisDeadLetters, NoDeadLetters
from qdo.brokers.kinesis.peek import PeekReader
from qdo.brokers.kinesis.poller import ShardPoller
from qdo.brokers.kinesis.positions import CHILD_START, FINISHED, POSITIONS, is_end, pack
from qdo.brokers.kinesis.reader import ShardReader
from qdo.brokers.kinesis.sender import KinesisSender
from qdo.brokers.kinesis.shards import Shards
from qdo.brokers.kinesis.subscription import KinesisSubscription
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.jobs.retry import PolicyInForce
from qdo.positions import position_now

log = logging.getLogger(__name__)
# The number of idle connections to keep for reads.
READERS = 256
# The maximum number of open calls that send messages.
SENDERS = 16


class KinesisCatalog(QueueCatalog):
    """The shards of one stream. Safe to use from several threads or greenlets.

    :param peek: a function that opens a reader after a position of a shard.
    :param own_backlog: a function that returns the backlog of a shard, or None if this process does
        not read the shard.
    """

    def __init__(
        self,
        address: KinesisAddress,
        shards: Shards,
        peek: Callable[[str, int], PeekReader],
        own_backlog: Callable[[str, int], Backlog | None],
    ) -> None:
        # A start time also applies to child shards. "latest" skips only messages before a new app.
        self.child_start = CHILD_START if address.start == "latest" else 0
        self._address = address
        self._shards = shards
        self._peek = peek
        self._own_backlog = own_backlog

    def names(self) -> list[str]:
        return [shard.name for shard in self._shards.list()]

    def parents(self, queue: str) -> Sequence[str]:
        return self._shards.parents(queue)

    def is_reopened(self, queue: str) -> bool:
        shard = self._shards.known(queue)
        return shard is not None and not shard.closed

    def has_position(self, queue: str, position: int) -> bool:
        """Return whether a shard has a record, or may have had the record before it expired."""
        # This method makes a few calls, which count toward the shard's read limit.
        return self._shards.find(queue) is None or self._peek(queue, position).finds()

    def config_warnings(self, policies: Mapping[str, PolicyInForce]) -> list[str]:
        if self._address.dead_letters is not None:
            return []
        if all(each.then != "dead-letter" for each in policies.values()):
            return []
        return [
            f"a message of stream {self._address.stream} that fails for the last time will block"
            f" its shard: there is no store for dead letters; {NO_STORE_REMEDY}"
        ]

    def head(self, queue: str) -> int:
        """Return the current time at Kinesis; read no records."""
        return self._peek(queue, 0).head() if self._shards.find(queue) is not None else 0

    def backlog(self, queue: str, after: int) -> Backlog:
        """Return whether messages wait after a position, and their age."""
        # `count` is 1 for any number of messages, and `head` is the current time. If this process
        # does not own and read the shard, this makes a few calls, which count toward the shard's
        # read limit.
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


class KinesisBroker(AwsBroker):
    """The shards of one stream. Safe to use from several threads or greenlets."""

    capabilities = Capabilities(
        ordered=True,
        seekable=True,
        countable=False,
        delay=False,
        peek=True,
        max_body_bytes=MAX_BODY_BYTES,
        dedup=False,
        subscriptions=True,
        checks_config=True,
        end_position_text=FINISHED,
        backlog_budget=100,
    )
    positions = POSITIONS
    dead_letters: KinesisDeadLetters | NoDeadLetters

    def __init__(self, address: KinesisAddress, app: str) -> None:
        super().__init__()
        self.address = address
        self._subscriptions: dict[str, KinesisSubscription] = {}
        self._live: set[KinesisSubscription] = set()  # subscriptions that may still make calls
        self._client = make_client(address.place)
        # The clients do not retry, because readers and senders retry at different rates.
        self._reads = make_client(address.place, connections=SEEKERS, attempts=1)
        self._writes = make_client(address.place, connections=SENDERS, attempts=1)
        self._calls = make_calls(address.place, TARGET, METHODS, connections=READERS, version="1.1")
        self._source = KinesisApi(self._reads, self._calls, address)
        self._paces = ShardReadLimiter(1.0 / address.reads_per_second)
        self.shards = Shards(self._client, address)
        self._sender = KinesisSender(
            self._writes, address, self.shards, self._source.record_bytes, self._stopped
        )
        self.catalog = KinesisCatalog(address, self.shards, self._peek, self._own_backlog)
        self.dead_letters = NoDeadLetters()
        if address.dead_letters is not None:
            self.dead_letters = KinesisDeadLetters(
                address.place, *address.dead_letters, app, self._resend
            )
        try:
            self.shards.list()
            self.dead_letters.check()
        except BaseException:
            self.close()
            raise

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages durably; return their ids, which are sequence numbers.

        The queue of a message is a ShardId or the stream. A ShardId keeps the order within the
        shard. A message to the stream goes to the shard of its key, and without a key to any shard.

        :raises PartialSendError: Kinesis stored only some messages; the error lists the others.
        """
        return [str(number) for number in self._send(messages)]

    def _send(self, messages: Sequence[Outgoing]) -> list[int]:
        with self._begun_to_send():
            return self._sender.send(messages)

    def _resend(self, letter: DeadLetterRecord) -> int:
        # If the shard of the message is closed, send the message to the current shard of its key.
        shard = self.shards.find(letter.queue)
        target = letter.queue if shard is not None and not shard.closed else self.address.stream
        own_id = POSITIONS.message_id(letter.position, self.id_node)
        headers = self.dead_letters.headers_again(letter, own_id)
        (number,) = self._send((Outgoing(target, letter.body, letter.key, headers),))
        return pack(number, 0, position_now())

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        subscription = KinesisSubscription(
            queue,
            after,
            functools.partial(self._begin, queue, self.address.trimmed),
            self._paces,
            functools.partial(self._wake, [queue]),
            functools.partial(self._ended, queue),
        )
        self._subscriptions[queue] = subscription
        self._live.add(subscription)
        subscription.start()
        return subscription

    def _ended(self, queue: str, subscription: KinesisSubscription) -> None:
        """Drop a closed subscription and its messages."""
        self._live.discard(subscription)
        if self._subscriptions.get(queue) is subscription:
            del self._subscriptions[queue]

    def reader(self, queue: str, after: int) -> Reader:
        return self._peek(queue, after)

    def _peek(self, queue: str, after: int) -> PeekReader:
        begin = functools.partial(self._begin, queue, "look")
        return PeekReader(queue, after, begin, self._paces, self._stopped)

    def _own_backlog(self, queue: str, after: int) -> Backlog | None:
        own = self._subscriptions.get(queue)
        return None if own is None else own.backlog(after)

    def _begin(self, queue: str, trimmed: str, after: int) -> ShardReader:
        shard = self.shards.find(queue)
        inherits = shard is not None and self.shards.has_listed_parent(queue)
        start = StartPosition(self.address.start, inherits)
        if trimmed != "look" and after == CHILD_START:
            log.info("queue %s: starting at its first message", queue)
        elif trimmed != "look" and not after:
            log.info("queue %s: it has no position yet, starting at %s", queue, start.words())
        poll = ShardPoller(after, start, self._paces.pause_seconds)
        keys = None if shard is None else shard.hash_keys
        is_listed = functools.partial(self.shards.is_listed, queue)
        reading = ShardReader(self._source, queue, keys, poll, trimmed, is_listed)
        if shard is None:
            reading.expired()
        return reading

    def close(self) -> None:
        self._stopped.set()
        subscriptions = list(self._live)
        for each in subscriptions:
            each.close()
        self._end_sending()
        for each in subscriptions:
            each.join(CLOSE_SECONDS)
        self._subscriptions.clear()
        self.dead_letters.close()
        for client in (self._calls, self._reads, self._writes, self._client):
            client.close()
