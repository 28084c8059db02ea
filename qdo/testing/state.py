"""The state that outlives the processes of a testing kit, such as attempts and queue nodes."""

from __future__ import annotations

import contextlib
import itertools
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ujson

from qdo.app import App
from qdo.brokers.base import Row
from qdo.coordination.interrupted_attempts import InFlight, marked_node
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.encoding import is_raw, parsed
from qdo.errors import BodyDecodeError, KeyMissingError, NotFoundError
from qdo.ops.requests import whole_item
from qdo.outcomes import Event, OutcomeName
from qdo.settings.settings import Settings
from qdo.settings.vaults import opener_of, vault_of
from qdo.testing.clock import Clock
from qdo.testing.faults import Faults
from qdo.testing.memory_broker import MemoryBroker, MemoryStore
from qdo.testing.memory_fleet import KitLimits, KitPauses


class MemoryCoordinator:
    """The queue nodes of an app, as bytes.

    Transactions are not needed, because there is one thread.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, bytes] = {}
        self._transactions = 0

    def queues(self) -> list[str]:
        return sorted(self._nodes)

    def node(self, queue: str) -> QueueNode:
        return QueueNode.parse(self._nodes.get(queue, b""))

    def read_queues(self, names: Sequence[str]) -> dict[str, QueueNode]:
        return {name: self.node(name) for name in names}

    def claim(self, queue: str, worker: str) -> tuple[int, QueueNode]:
        fence = self._write(queue, self.node(queue).owned_by(worker))
        return fence, self.node(queue)

    def write(self, queue: str, node: QueueNode, worker: str) -> bool:
        """Write a node for the owner; return False if another worker owns the queue."""
        if self.node(queue).owner != worker:
            return False
        self._write(queue, node)
        return True

    def free(self, worker: str) -> None:
        for queue in self.queues():
            node = self.node(queue)
            if node.owner == worker:
                self._write(queue, node.owned_by(""))

    def count_crash(self, in_flight: Iterable[InFlight], reason: str) -> None:
        """Count an attempt of each message that was in flight in a dead process."""
        for each in in_flight:
            node = self.node(each.queue)
            marked = marked_node(node, each, reason) if node.owner == each.worker else None
            if marked is not None:
                self._write(each.queue, marked)

    def change(self, queue: str, change: Callable[[QueueNode], QueueNode]) -> QueueNode:
        """Change a node like an operator; return the changed node, or raise NotFoundError."""
        if queue not in self._nodes:
            raise NotFoundError(what="queue", name=queue)
        node = self.node(queue)
        self._write(queue, replace(change(node), seek=node.seek + 1))
        return self.node(queue)

    def _write(self, queue: str, node: QueueNode) -> int:
        self._nodes[queue] = node.encode()
        self._transactions += 1
        return self._transactions


@dataclass(frozen=True, slots=True)
class Attempt:
    """An ended attempt.

    :ivar body: the body that the job received, or the original bytes if decoding failed.
    :ivar outcome: "done", "retry", "wait", "dead-letter", "skip", "block", "stop" or "lost".
    :ivar error: the error on one line; None if the job returned.
    :ivar seconds: duration of the job on the clock of the kit.
    :ivar worker: name of the worker. Each new worker has another name.
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
class State:
    """One app, its messages, and their recorded progress.

    :ivar chance: a function that returns the random numbers of backoffs, from 0 to 1.
    :ivar most: maximum number of jobs that a run may start. `left` is the number of remaining jobs.
    """

    app: App
    settings: Settings
    clock: Clock
    chance: Callable[[], float]
    pauses: KitPauses
    store: MemoryStore = field(init=False)
    broker: MemoryBroker = field(init=False)
    limits: KitLimits = field(init=False)
    record: MemoryCoordinator = field(default_factory=MemoryCoordinator)
    faults: Faults = field(default_factory=Faults)
    attempts: list[Attempt] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    most: int = 0
    left: int = 0
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock.position)
        self.broker = MemoryBroker(self.store, self.app.name)
        self.limits = KitLimits(self.app, self.clock.passed)

    def busiest(self) -> str:
        """Describe the queue with the most attempts in an endless run, for an error message."""
        recent = self.attempts[-self.most :]
        ((queue, count),) = Counter(each.queue for each in recent).most_common(1) or [("", 0)]
        last = next((each for each in reversed(recent) if each.queue == queue), None)
        if last is None:
            return "no attempt ended"
        error = "" if last.error is None else f": {last.error}"
        return (
            f"{count} of them were of queue {queue!r}; its last one, of the message "
            f"{reprlib.repr(last.body)}, ended with {last.outcome!r}{error}"
        )

    def requests(self, pool: str | None) -> list[dict[str, Any]]:
        store = self.broker.requests
        vault = vault_of(self.settings, self.app.name, self.broker.stream_of)
        records = [store.find(each.id) for each in store.records(pool, limit=sys.maxsize)]
        return [whole_item(each, self.clock.now, vault, True) for each in records if each]

    def rows(self, queue: str, after: int) -> Iterator[Row]:
        reader = self.broker.reader(queue, after)
        while rows := reader.fetch(1000):
            yield from itertools.starmap(Row, rows)

    def is_pool(self, queue: str) -> bool:
        job = self.app.job_for(queue)
        return job is not None and job.pool

    def note(self, event: Event, fence: int, seconds: float, body: Any) -> None:
        """Record an attempt. `body` is the body that the job of a request received."""
        key = None
        if not self.is_pool(event.queue):
            (row,) = self.broker.reader(event.queue, event.position - 1).fetch(1)
            message = Row(*row)
            body = self.body_of(event.queue, message)
            key = message.key
        attempt = Attempt(
            queue=event.queue,
            body=body,
            key=key,
            outcome=event.outcome,
            error=event.error,
            attempt=event.attempt,
            fence=fence,
            seconds=seconds,
            id=event.message_id,
            position=event.position,
            worker=event.worker,
        )
        self.attempts.append(attempt)

    def body_of(self, queue: str, row: Row) -> Any:
        """Return the decoded body, or the bytes if decoding fails."""
        opener = opener_of(self.settings, self.app.name, self.broker.stream_of)
        if opener is not None:
            with contextlib.suppress(BodyDecodeError, KeyMissingError):
                row = Row(*opener.open(queue, row))
        return _decoded(row)


def _decoded(row: Row) -> Any:
    headers = parsed(row.headers)
    if headers is None or is_raw(headers):
        return row.body
    try:
        return ujson.loads(row.body)
    except ValueError:
        return row.body
