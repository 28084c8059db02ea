"""The Kinesis broker: one stream, each of its shards a queue.

A queue is called by its ShardId. Its position is the sequence number of the last record that is
done, recorded in the queue node and nowhere else: no table besides, no agent. After a reshard the
children's queues begin when those of their parents are processed to their end.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from qdo.brokers.aws import make_calls, make_client
from qdo.brokers.aws_address import KinesisAddress
from qdo.brokers.base import Backlog, Broker, Capabilities, DeadLetterRecord, Outgoing
from qdo.brokers.embedded_letters import retried_headers
from qdo.brokers.kinesis_letters import KinesisLetters
from qdo.brokers.kinesis_poller import ShardPoll, Start
from qdo.brokers.kinesis_positions import FINISHED, HEIR, POSITIONS, is_end, pack
from qdo.brokers.kinesis_reader import PassingReader
from qdo.brokers.kinesis_reading import (
    METHODS,
    SEEKERS,
    TARGET,
    Paces,
    ShardReading,
    Source,
)
from qdo.brokers.kinesis_records import MAX_BODY_BYTES
from qdo.brokers.kinesis_sending import KinesisSender
from qdo.brokers.kinesis_shards import Shards
from qdo.brokers.kinesis_subscription import KinesisSubscription
from qdo.brokers.subscription import Reader, Subscription
from qdo.errors import QdoError, UnsupportedError, UsageError
from qdo.message import position_now
from qdo.policy import Policy

log = logging.getLogger(__name__)

READERS = 256
"""Connections that are kept for reads."""
SENDERS = 16
"""Requests with messages that are open at once."""
CLOSE_SECONDS = 25.0
"""How long closing waits for requests that are under way: longer than their time-out."""
_REMEDY = (
    "add dead_letters=s3://BUCKET/PREFIX to the broker's address, or give its job"
    ' Policy(then="block") or "skip"'
)

Wake = Callable[[Iterable[str]], None]


class KinesisBroker(Broker):
    """The shards of one stream. Safe to use from several threads or greenlets.

    :param app: part of the names of dead letters.
    :raises CredentialsError: there are no credentials, or they cannot be used.
    :raises AwsNotFoundError: there is no such stream, or no such bucket.
    :raises AwsUnreachableError: Kinesis does not answer.
    """

    capabilities = Capabilities(
        ordered=True,
        seekable=True,
        countable=False,
        delay=False,
        peek=True,
        max_body_bytes=MAX_BODY_BYTES,
        dedup=False,
    )
    id_node = 0
    positions = POSITIONS
    finished_text = FINISHED
    list_seconds = 10.0
    backlog_budget = 100

    def __init__(self, address: KinesisAddress, app: str) -> None:
        self.address = address
        # A time counts for children as well; the newest is for those who were not there before.
        self.heir_last = HEIR if address.start == "latest" else 0
        self._stopped = threading.Event()
        self._sending_now = threading.Condition()
        self._senders = 0
        self._wakes: list[Wake] = []
        self._subscriptions: dict[str, KinesisSubscription] = {}
        self._live: set[KinesisSubscription] = set()
        """All that may still make a request."""
        self._client = make_client(address.place)
        # Reading and sending repeat by themselves, and at their own pace.
        self._reads = make_client(address.place, connections=SEEKERS, attempts=1)
        self._writes = make_client(address.place, connections=SENDERS, attempts=1)
        self._calls = make_calls(address.place, TARGET, METHODS, connections=READERS, version="1.1")
        self._source = Source(self._reads, self._calls, address)
        self._paces = Paces(1.0 / address.reads_per_second)
        self.shards = Shards(self._client, address)
        self._sender = KinesisSender(
            self._writes, address, self.shards, self._source.record_bytes, self._stopped
        )
        self._letters = None
        if address.dead_letters is not None:
            self._letters = KinesisLetters(address.place, *address.dead_letters, app)
        try:
            self.shards.list()
            if self._letters is not None:
                self._letters.check()
        except BaseException:
            self.close()
            raise

    # --- queues ---

    def queues(self) -> list[str]:
        return [shard.name for shard in self.shards.list()]

    def parents(self, queue: str) -> Sequence[str]:
        """Return the shards that a shard came out of, also those that have expired.

        :raises: as `queues`.
        """
        return self.shards.parents(queue)

    def goes_on(self, queue: str) -> bool:
        shard = self.shards.known(queue)
        return shard is not None and not shard.closed

    def has_place(self, queue: str, position: int) -> bool:
        """Return whether a record is in a shard, or may be one that is older than all there.

        Asks Kinesis a few times, which counts for what the shard can be read.
        """
        return self.shards.find(queue) is None or self._passing(queue, position).finds()

    def advice(self, policies: Mapping[str, Policy]) -> list[str]:
        """Return what should be said at a worker's start: dead letters have no place."""
        if self._letters is not None or all(
            each.then != "dead-letter" for each in policies.values()
        ):
            return []
        return [
            f"a message of stream {self.address.stream} that fails for the last time will hold up"
            f" its shard: it cannot be set aside; {_REMEDY}"
        ]

    # --- sending ---

    def send(self, message: Outgoing) -> str:
        return self.send_many((message,))[0]

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages durably; return their ids, which are sequence numbers.

        A queue is a ShardId, or the stream itself: then each message goes to the shard of its key,
        one without a key to any. Order is kept within a shard in the first case, within a key in
        the second. Kinesis cannot store all or none.

        :raises PartlySentError: some were not stored; it says which.
        """
        return [str(number) for number in self._send(messages)]

    def _send(self, messages: Sequence[Outgoing]) -> list[int]:
        with self._sending_now:
            if self._stopped.is_set():
                raise UsageError(reason="this broker is closed: open it anew to send")
            self._senders += 1
        try:
            return self._sender.send(messages)
        finally:
            with self._sending_now:
                self._senders -= 1
                self._sending_now.notify_all()

    # --- consuming ---

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
            functools.partial(self._wake, queue),
            functools.partial(self._ended, queue),
        )
        self._subscriptions[queue] = subscription
        self._live.add(subscription)
        subscription.start()
        return subscription

    def _ended(self, queue: str, subscription: KinesisSubscription) -> None:
        """Let go of a subscription that is closed, and so of the messages that it has in hand."""
        self._live.discard(subscription)
        if self._subscriptions.get(queue) is subscription:
            del self._subscriptions[queue]

    def reader(self, queue: str, after: int) -> Reader:
        return self._passing(queue, after)

    def _passing(self, queue: str, after: int) -> PassingReader:
        begin = functools.partial(self._begin, queue, "look")
        return PassingReader(queue, after, begin, self._paces, self._stopped)

    def _begin(self, queue: str, trimmed: str, after: int) -> ShardReading:
        """Return the reading of a shard behind a position."""
        shard = self.shards.find(queue)
        inherits = shard is not None and self.shards.has_listed_parent(queue)
        start = Start(self.address.start, inherits)
        if trimmed != "look" and after == HEIR:
            log.info("queue %s: it begins with its first message", queue)
        elif trimmed != "look" and not after:
            log.info("queue %s: it has no position yet and begins with %s", queue, start.words())
        poll = ShardPoll(after, start, self._paces.pause_seconds)
        keys = None if shard is None else shard.hash_keys
        is_listed = functools.partial(self.shards.is_listed, queue)
        reading = ShardReading(self._source, queue, keys, poll, trimmed, is_listed)
        if shard is None:
            reading.expired()
        return reading

    def listen(self, wake: Wake) -> Callable[[], None]:
        self._wakes.append(wake)

        def stop() -> None:
            if wake in self._wakes:
                self._wakes.remove(wake)

        return stop

    def _wake(self, queue: str) -> None:
        for wake in list(self._wakes):
            wake([queue])

    # --- counting ---

    def backlog(self, queue: str, after: int) -> Backlog:
        """Return whether anything waits behind a position, and how old it is.

        `count` is 1 for any number; `head` is the present. Asks Kinesis up to a few times, which
        counts for what a shard can be read, unless this process owns the queue and reads it.
        """
        own = self._subscriptions.get(queue)
        found = None if own is None else own.backlog(after)
        if found is not None:
            return found
        if is_end(after) or self.shards.find(queue) is None:
            return Backlog(0, None, 0, approximate=True, behind_seconds=0.0)
        return self._passing(queue, after).look()

    def retire(self, queue: str, last: int, older_than: float) -> int:
        """Return 0: Kinesis deletes records older than the retention of the stream by itself."""
        return 0

    # --- dead letters ---

    def bury(self, letter: DeadLetterRecord) -> None:
        self._kept_letters().bury(letter)

    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        return [] if self._letters is None else self._letters.records(queue)

    def dead_letter(self, queue: str, position: int) -> DeadLetterRecord | None:
        return None if self._letters is None else self._letters.record(queue, position)

    def dead_letter_counts(self) -> Mapping[str, int]:
        return {} if self._letters is None else self._letters.counts()

    def retry_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[int | None]:
        """Send dead letters again, in the given order, and delete them then.

        A letter whose shard is closed goes to the shard that its key belongs to now. Not one
        transaction: what ends in between leaves a letter that was sent again.
        """
        return [self._retry(queue, position) for queue, position in letters]

    def _retry(self, queue: str, position: int) -> int | None:
        kept = self._kept_letters()
        letter = kept.record(queue, position)
        if letter is None:
            return None
        shard = self.shards.find(queue)
        target = queue if shard is not None and not shard.closed else self.address.stream
        headers = retried_headers(letter.headers, POSITIONS.message_id(position, self.id_node))
        (number,) = self._send((Outgoing(target, letter.body, letter.key, headers),))
        try:
            kept.discard(((queue, position),))
        except QdoError as error:  # it is sent, and others are to follow
            log.warning(
                "a dead letter was sent again, and stays a dead letter: %s of queue %r: %s",
                POSITIONS.message_id(position, self.id_node),
                queue,
                error,
            )
        return pack(number, 0, position_now())

    def discard_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[bool]:
        return self._kept_letters().discard(letters)

    def _kept_letters(self) -> KinesisLetters:
        if self._letters is None:
            raise UnsupportedError(
                broker="Kinesis",
                what="keep dead letters",
                remedy=_REMEDY,
            )
        return self._letters

    def close(self) -> None:
        self._stopped.set()
        subscriptions = list(self._live)
        for each in subscriptions:
            each.close()
        with self._sending_now:
            self._sending_now.wait_for(lambda: self._senders == 0, CLOSE_SECONDS)
        for each in subscriptions:
            each.join(CLOSE_SECONDS)
        self._subscriptions.clear()
        if self._letters is not None:
            self._letters.close()
        for client in (self._calls, self._reads, self._writes, self._client):
            client.close()
