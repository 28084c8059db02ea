"""Brokers of every kind as their owners see them: the same words, whatever stands behind."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import gevent
import pytest

from qdo.brokers.base import Broker, Outgoing, Reader, Row, Subscription
from qdo.brokers.registry import open_broker
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from tests.support.brokers import ADDRESSES

WAIT_SECONDS = 20.0


class BrokerSetup:
    """One broker of a kind, and further connections to it.

    :ivar ordered: messages of a queue come in the order in which they were sent.
    """

    def __init__(self, kind: str, url: str, store: MemoryStore | None = None) -> None:
        self.kind = kind
        self.url = url
        self.ordered = kind != "sqs-standard"
        self._store = store
        self._opened: list[Broker] = []
        self.broker = self.connect()

    def connect(self) -> Broker:
        """Open a further connection, as another process would."""
        if self._store is not None:
            self._opened.append(MemoryBroker(self._store, "app"))
        else:
            self._opened.append(open_broker(self.url, "app"))
        return self._opened[-1]

    def queue(self, number: int) -> str:
        """Return the name of a queue."""
        if self.kind == "kinesis":
            return f"shardId-{number:012d}"
        return f"q{number}.fifo" if self.kind == "sqs-fifo" else f"q{number}"

    def send(self, number: int, *bodies: bytes, key: str | None = None) -> list[str]:
        """Send bodies to a queue; return their ids."""
        queue = self.queue(number)
        return self.broker.send_many([Outgoing(queue, body, key) for body in bodies])

    def close(self) -> None:
        for broker in self._opened:
            broker.close()


class QueueOwner:
    """Who has a queue: fetches as the engine does.

    :param after: position after which it begins, as the owner before it recorded.
    :param unconfirmed: the same of messages that are done and may come again.
    """

    def __init__(
        self, broker: Broker, queue: str, after: int = 0, unconfirmed: Sequence[str] = ()
    ) -> None:
        self.broker = broker
        self.queue = queue
        self.subscription: Subscription | None = None
        if broker.capabilities.subscriptions:
            self.subscription = broker.subscribe(queue, after, unconfirmed, lambda position: None)
        self._woken = False
        self._stop = broker.listen(self._wake)
        self.reader = self.rewound(after)

    def _wake(self, queues: object) -> None:
        self._woken = True

    def rewound(self, after: int) -> Reader:
        """Read again from behind a position, as after a failure."""
        if self.subscription is not None:
            self.reader = self.subscription.reader(after)
        else:
            self.reader = self.broker.reader(self.queue, after)
        return self.reader

    def take(self, count: int) -> list[Row]:
        """Return the next messages, exactly so many, each done as soon as it is fetched.

        SQS returns more messages of a group only when the returned ones are done.
        """
        found: list[Row] = []
        while len(found) < count:
            some = self.fetch(1)
            self.done(some)
            found += some
        return found

    def fetch(self, count: int) -> list[Row]:
        """Return the next messages, exactly so many."""
        found: list[Row] = []
        deadline = time.monotonic() + WAIT_SECONDS
        while len(found) < count:
            found += [Row(*row) for row in self.reader.fetch(count - len(found))]
            assert time.monotonic() < deadline, f"only {len(found)} of {count} came"
            gevent.sleep(0.002)
        return found

    def nothing_comes(self) -> bool:
        """Return whether the broker, asked once more, has nothing."""
        if self.subscription is None:
            return not list(self.reader.fetch(1))
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.subscription.at_tip():
            if list(self.reader.fetch(1)):
                return False
            assert time.monotonic() < deadline, "the broker never said that there is nothing"
            gevent.sleep(0.002)
        return not list(self.reader.fetch(1))

    def done(self, rows: Sequence[Row]) -> int:
        """Say that rows are done; return the position that is recorded, in line."""
        for row in rows:
            if self.subscription is not None:
                self.subscription.done(row.position)
        return max(row.position for row in rows)

    def id_of(self, row: Row) -> str:
        return self.broker.positions.message_id(row.position, self.broker.id_node)

    def leave(self) -> Sequence[str]:
        """Release the queue; return the unconfirmed messages."""
        self._stop()
        if self.subscription is None:
            return ()
        self.subscription.close()
        return self.subscription.unconfirmed()


def recorded(broker: Broker, position: int) -> int:
    """Return the position after which the next owner begins, as recorded in a queue node."""
    positions = broker.positions
    return positions.resume_after(positions.to_time(position), positions.to_text(position))


@contextlib.contextmanager
def bench(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[BrokerSetup]:
    """Give a broker of a kind, with two queues that may be used."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    store = MemoryStore() if kind == "memory" else None
    url = "" if kind == "memory" else ADDRESSES[kind](folder, name, request)
    made = BrokerSetup(kind, url, store)
    try:
        yield made
    finally:
        made.close()
