"""Shards of Kinesis from the side of tests: sending, and reading as an owner does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from qdo.brokers.base import Outgoing, Subscription
from qdo.brokers.kinesis.api import Taken
from qdo.brokers.kinesis.broker import KinesisBroker
from qdo.brokers.registry import open_broker
from tests.support.aws.clients import REGION

PATIENCE_SECONDS = 20.0
BRISK = "reads_per_second=4"
"""Nearly as many reads as Kinesis allows, so that tests wait little."""


def kinesis_url(endpoint: str, stream: str, options: str = BRISK) -> str:
    """Return the address of a stream."""
    return f"kinesis://{REGION}/{stream}?endpoint={endpoint}" + (f"&{options}" if options else "")


def opened(endpoint: str, stream: str, options: str = BRISK) -> KinesisBroker:
    """Return a broker for a stream."""
    broker = open_broker(kinesis_url(endpoint, stream, options), "app")
    assert isinstance(broker, KinesisBroker)
    return broker


def outgoing(queue: str, numbers: Iterable[int], keys: int = 0) -> list[Outgoing]:
    """Return messages with numbers as bodies, spread over so many keys; 0: without a key."""
    return [
        Outgoing(queue, b"%d" % number, f"key {number % keys}" if keys else None)
        for number in numbers
    ]


class ShardOwner:
    """Reads a shard as its owner does: fetches when it is woken, and reports done messages."""

    def __init__(
        self, broker: KinesisBroker, shard: str, after: int = 0, *, confirm: bool = True
    ) -> None:
        self._news = threading.Event()
        self._stop = broker.listen(lambda names: self._heard(shard, names))
        self.rows: list[Taken] = []
        self._confirm = confirm
        self.subscription: Subscription = broker.subscribe(shard, after, (), lambda _: None)
        self._reader = self.subscription.reader(after)

    def _heard(self, shard: str, names: Iterable[str]) -> None:
        if shard in set(names):
            self._news.set()

    def back_to(self, after: int) -> None:
        """Start again behind a position, as after a failure."""
        self.rows = []
        self._reader = self.subscription.reader(after)

    def fetch(self, limit: int = 100) -> Sequence[Taken]:
        """Fetch once."""
        rows = self._reader.fetch(limit)
        self.rows += rows
        if rows and self._confirm:
            self.subscription.done_through(rows[-1][0])
        return rows

    def read_until(self, enough: Callable[[], bool]) -> None:
        """Fetch until a condition holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            rows = self.fetch()
            if enough():
                return
            if not rows:
                left = deadline - time.monotonic()
                assert left > 0, f"only {len(self.rows)} messages came: {self.bodies()[-5:]}"
                self._news.wait(min(left, 1.0))
                self._news.clear()

    def read(self, count: int) -> list[bytes]:
        """Return the bodies of so many messages."""
        self.read_until(lambda: len(self.rows) >= count)
        return self.bodies()

    def read_to_tip(self) -> list[bytes]:
        """Return the bodies of all messages up to the tip."""
        self.read_until(self.subscription.at_tip)
        return self.bodies()

    def read_to_end(self) -> list[bytes]:
        """Return the bodies of all messages of a closed shard."""
        self.read_until(lambda: self.subscription.end is not None)
        return self.bodies()

    def bodies(self) -> list[bytes]:
        return [row[1] for row in self.rows]

    def close(self) -> None:
        self.subscription.close()
        self._stop()
