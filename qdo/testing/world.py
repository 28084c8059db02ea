"""What outlives the processes of a testing kit, and what is kept for the test to look at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ujson

from qdo.app import App
from qdo.brokers.base import Row
from qdo.events import Event, OutcomeName
from qdo.headers import is_raw, parsed
from qdo.settings import Settings
from qdo.testing.broker import MemoryBroker, MemoryStore
from qdo.testing.clock import Clock
from qdo.testing.faults import Faults
from qdo.testing.record import Record


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that ended.

    :ivar body: as the job got it; the bytes as they were sent where they do not decode.
    :ivar outcome: "done", "retry", "dead-letter", "skip", "block", "stop" or "lost".
    :ivar error: what went wrong, as one line; None where the job returned.
    :ivar seconds: how long the job ran on the clock of the kit.
    :ivar worker: which worker it was; one that takes over has a name of its own.
    """

    queue: str
    body: Any
    key: str | None
    outcome: OutcomeName
    error: str | None
    attempt: int
    fence: int
    seconds: float
    id: str
    position: int
    worker: str


@dataclass(slots=True)
class World:
    """One app, its messages, and what is recorded of them.

    :ivar chance: what back-offs take for their jitter, in [0, 1].
    :ivar attempts: every attempt that ended, in order.
    :ivar stops: the reasons of `qdo.Stop`, in order.
    :ivar most: jobs that a run may start before the kit gives up, of which `left` are left.
    """

    app: App
    settings: Settings
    clock: Clock
    store: MemoryStore
    chance: Callable[[], float]
    record: Record = field(default_factory=Record)
    faults: Faults = field(default_factory=Faults)
    attempts: list[Attempt] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    most: int = 0
    left: int = 0
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def broker(self) -> MemoryBroker:
        """Return a new broker on the store."""
        return MemoryBroker(self.store, self.app.name)

    def rows(self, queue: str, after: int) -> Iterator[Row]:
        """Give the messages of a queue behind a position."""
        reader = self.broker().reader(queue, after)
        while rows := reader.fetch(1000):
            yield from rows

    def note(self, event: Event, fence: int, seconds: float) -> None:
        """Keep an attempt that ended."""
        (row,) = self.broker().reader(event.queue, event.position - 1).fetch(1)
        self.attempts.append(
            Attempt(
                event.queue,
                body_of(row),
                row.key,
                event.outcome,
                event.error,
                event.attempt,
                fence,
                seconds,
                event.message_id,
                event.position,
                event.worker,
            )
        )


def body_of(row: Row) -> Any:
    """Return the body as a job gets it, or the bytes where it cannot be decoded."""
    headers = parsed(row.headers)
    if headers is None or is_raw(headers):
        return row.body
    try:
        return ujson.loads(row.body)
    except ValueError:
        return row.body
