"""A broker in memory that must be asked for messages, and hardly ever is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from qdo.brokers.base import Outgoing, Row, Subscription
from qdo.testing.memory_broker import MemoryBroker


class PolledBroker(MemoryBroker):
    """Asks once when a claim begins, and later only when its subscription is rung.

    :ivar rung: the queue of every ring.
    """

    capabilities = replace(MemoryBroker.capabilities, subscriptions=True, doorbell=True)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.rung: list[str] = []
        self.wake: Callable[[Iterable[str]], None] = lambda queues: None

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        ids = super().send_many(messages)
        if self.on_sent is not None:
            self.on_sent({message.queue for message in messages})
        return ids

    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        self.wake = wake
        return lambda: None

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        return PolledSubscription(self, queue, after)


class PolledSubscription(Subscription):
    """The messages that were there at the last poll."""

    def __init__(self, broker: PolledBroker, queue: str, after: int) -> None:
        self._broker = broker
        self._queue = queue
        self._source = MemoryBroker.reader(broker, queue, after)
        self._rows: list[Row] = []
        self._ask()

    def _ask(self) -> None:
        self._rows += itertools.starmap(Row, self._source.fetch(1000))

    def reader(self, after: int) -> PolledReader:
        return PolledReader(self._rows, after)

    def at_tip(self) -> bool:
        return True

    def poll_now(self) -> None:
        self._broker.rung.append(self._queue)
        self._ask()
        self._broker.wake([self._queue])

    def close(self) -> None:
        """Do nothing: its source has nothing open."""


class PolledReader:
    """Reads the messages that have been polled."""

    def __init__(self, rows: list[Row], after: int) -> None:
        self._rows = rows
        self._after = after

    def fetch(self, limit: int) -> list[Row]:
        found = [row for row in self._rows if row.position > self._after][:limit]
        if found:
            self._after = found[-1].position
        return found
