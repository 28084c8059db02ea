"""What the contracts need of a broker: fixtures, and the owner of a queue.

A package with a broker names this module in `pytest_plugins`, defines the fixture `broker_url`, and
imports the tests of each contract that its broker keeps::

    pytest_plugins = ["qdo.testing.contracts.fixtures"]
    from qdo.testing.contracts.owners import *  # every broker
    from qdo.testing.contracts.logs import *  # positions are times
    from qdo.testing.contracts.dead_letters import *
    from qdo.testing.contracts.options import *  # delays and deduplication
    from qdo.testing.contracts.deletion import *  # queues that workers delete
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gevent
import pytest

from qdo.brokers.base import Broker, Outgoing, Reader, Row, Subscription
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.registry import open_broker

WAIT_SECONDS = 20.0
DEAD_AT = 1_700_000_000.5


@pytest.fixture
def broker_url() -> str:
    """Return the address of an empty broker; each package defines this fixture."""
    pytest.fail("define a fixture broker_url that returns the address of an empty broker")


@pytest.fixture
def connect(broker_url: str) -> Iterator[Callable[..., Broker]]:
    """Open further connections to the broker, as other processes would."""
    opened: list[Broker] = []

    def connect(app: str = "app") -> Broker:
        opened.append(open_broker(broker_url, app))
        return opened[-1]

    yield connect
    for broker in opened:
        broker.close()


@pytest.fixture
def broker(connect: Callable[..., Broker]) -> Broker:
    return connect()


@pytest.fixture
def only_wakeups() -> None:
    """Let listeners look when they are woken, or a message is due, and else once an hour."""


@pytest.fixture
def rows() -> Callable[[Broker, str], list[Row]]:
    """Return the waiting messages of a queue, in order."""
    return lambda broker, queue: [Row(*each) for each in broker.reader(queue, 0).fetch(100)]


@pytest.fixture
def made(broker_url: str, connect: Callable[..., Broker]) -> BrokerSetup:
    return BrokerSetup(connect, broker_url)


@pytest.fixture
def owner(made: BrokerSetup) -> Iterator[Callable[..., QueueOwner]]:
    """Create owners of queues, on their own connections; they leave at the end."""
    owners: list[QueueOwner] = []

    def make(number: int = 0, after: int = 0, unconfirmed: tuple[str, ...] = ()) -> QueueOwner:
        owners.append(QueueOwner(made.connect(), made.queue(number), after, unconfirmed))
        return owners[-1]

    yield make
    for each in owners:
        each.leave()


class BrokerSetup:
    """One broker, and further connections to it.

    :param connect: opens a connection, as another process would.
    :param url: the address; "" for a broker without one.
    :param queue: returns the name of a queue, given its number.
    :ivar ordered: messages of a queue come in the order in which they were sent.
    """

    def __init__(
        self,
        connect: Callable[[], Broker],
        url: str,
        ordered: bool = True,
        queue: Callable[[int], str] = "q{}".format,
    ) -> None:
        self.connect = connect
        self.url = url
        self.ordered = ordered
        self.queue = queue
        self.broker = connect()

    def send(self, number: int, *bodies: bytes, key: str | None = None) -> list[str]:
        """Send bodies to a queue; return their ids."""
        queue = self.queue(number)
        return self.broker.send_many([Outgoing(queue, body, key) for body in bodies])


class QueueOwner:
    """The owner of a queue, which fetches as the engine does.

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


def dead_letter(queue: str = "q", position: int = 1, **changed: Any) -> DeadLetterRecord:
    """Return a dead letter whose fields are all set, but for those that are given."""
    values: dict[str, Any] = {
        "body": b'{"n":1}',
        "key": "k",
        "headers": '{"a":"b"}',
        "error": "ValueError: no",
        "traceback": "Traceback ...",
        "attempts": 10,
        "worker": "worker-0000000001",
        "fence": 42,
        "dead_at": DEAD_AT,
    }
    return DeadLetterRecord(queue, position, **{**values, **changed})
