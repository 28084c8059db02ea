"""The fault points of a worker, and wrappers that add them to an app and its broker.

A fault point lies between two steps. There, a test can let the worker die or lose its lease.

======================  ================================================================
point                   the worker is about to do this, or has just done it
======================  ================================================================
after-claim             own a queue
before-, after-fetch    read messages of a queue from the broker
before-, after-job      run the job for a message; after it whether it returned or raised
before-, after-send     store the messages, or the requests, that a job sends
before-, after-job-failure  call the app's `job_failure`
before-, after-dead-letter  store a dead letter
before-, after-checkpoint   record the progress of a queue, and its failing message
before-, after-release  release a queue
before-, after-take  take requests of a pool
before-, after-end   store how a request ended, or let it wait again
======================  ================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast, get_args

from qdo.app import App
from qdo.brokers.base import Outgoing, Reader
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.request_checks import check_requests
from qdo.brokers.requests import IN_STEPS, PAUSED, NewRequest, Take, Taken
from qdo.encoding import MAX_STORED_BODY_BYTES, with_header
from qdo.errors import UsageError
from qdo.jobs.middleware import FailureHook, Hooks, Observer
from qdo.message import Message
from qdo.testing.database import StagedMessages
from qdo.testing.memory_broker import EmbeddedDeadLetters, MemoryBroker, MemoryRequests, MemoryStore
from qdo.text import did_you_mean
from qdo.worker.engine.slot import Row
from qdo.worker.executors.base import JobAborted

Point: TypeAlias = Literal[
    "after-claim",
    "before-fetch",
    "after-fetch",
    "before-job",
    "after-job",
    "before-send",
    "after-send",
    "before-job-failure",
    "after-job-failure",
    "before-dead-letter",
    "after-dead-letter",
    "before-checkpoint",
    "after-checkpoint",
    "before-release",
    "after-release",
    "before-take",
    "after-take",
    "before-end",
    "after-end",
]

# All fault points.
POINTS: tuple[Point, ...] = get_args(Point)


class Crashed(JobAborted):
    """Unwinds the stack of a dead process. qdo does not treat this exception as a failure."""


@dataclass(frozen=True, slots=True)
class Step:
    """A fault point that a worker reached."""

    point: Point
    queue: str


@dataclass(slots=True)
class _Fault:
    point: Point | None
    queue: str | None
    left: int
    act: Callable[[], None]


class Faults:
    """The planned faults. `steps` lists the fault points that workers have reached, in order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._armed: list[_Fault] = []

    def arm(
        self, act: Callable[[], None], point: Point | None, queue: str | None, nth: int
    ) -> None:
        """Call `act` once, when a worker reaches a fault point of a queue the nth time."""
        if point is not None and point not in POINTS:
            hint = did_you_mean(point, POINTS)
            raise UsageError(
                reason=f"a fault point must be one of {', '.join(POINTS)}, got {point!r}{hint}"
            )
        if nth < 1:
            raise UsageError(reason=f"nth must be at least 1, the first time, got {nth!r}")
        self._armed.append(_Fault(point, queue, nth, act))

    def pending(self) -> int:
        return len(self._armed)

    def reach(self, point: Point, queue: str) -> None:
        """Execute the planned faults of this point; raise `Crashed` if one kills the process."""
        self.steps.append(Step(point, queue))
        due = []
        for fault in self._armed:
            if fault.point in (None, point) and fault.queue in (None, queue):
                fault.left -= 1
                if not fault.left:
                    due.append(fault)
        for fault in due:
            self._armed.remove(fault)
        for fault in due:
            fault.act()


# A function to call at a fault point of a queue.
Reach: TypeAlias = Callable[[Point, str], None]


class InstrumentedApp:
    """The app for the engine, with one more observer, and with fault points around a hook."""

    def __init__(self, app: App, reach: Reach, ended: Observer) -> None:
        self._app = app
        self.hooks = InstrumentedHooks(app.hooks, reach, ended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)


class InstrumentedHooks:
    def __init__(self, hooks: Hooks, reach: Reach, ended: Observer) -> None:
        self._hooks = hooks
        self._reach = reach
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    @property
    def observers(self) -> tuple[Observer, ...]:
        return (self._ended, *self._hooks.observers)

    @property
    def job_failure(self) -> FailureHook:
        hook = self._hooks.job_failure

        def call(message: Message, context: Any, error: BaseException) -> None:
            with _between(self._reach, "job-failure", [message.queue]):
                hook(message, context, error)

        return call


class _PointedRequests(MemoryRequests):
    """The requests of an app, as a worker process or a job uses them.

    :param on_pause: a function to call after a job has paused its request.
    :param staged: holds requests until the transactions of the app commit.
    """

    def __init__(
        self,
        broker: MemoryBroker,
        reach: Reach,
        on_pause: Callable[[str], None] = lambda id: None,
        staged: StagedMessages | None = None,
    ) -> None:
        super().__init__(broker)
        self._reach = reach
        self._on_pause = on_pause
        self._staged = staged

    def ask(self, requests: Sequence[NewRequest], connection: Any = None) -> list[bool]:
        with _between(self._reach, "send", [each.pool for each in requests]):
            if connection is None or self._staged is None:
                return super().ask(requests, connection)
            check_requests(requests, MAX_STORED_BODY_BYTES)
            self._staged.stage(connection, requests)
            return [True] * len(requests)

    def store(self, requests: Sequence[NewRequest]) -> None:
        """Store the requests of committed transactions."""
        super().ask(requests)

    def take(
        self, owner: str, pool: str, places: int, running: Collection[str], oldest: int = 0
    ) -> Taken:
        with _between(self._reach, "take", [pool]):
            return super().take(owner, pool, places, running, oldest)

    def note(self, take: Take, state: int, *args: Any) -> bool:
        if state == IN_STEPS:
            with _between(self._reach, "end", self._pool_of(take)):
                return super().note(take, state, *args)
        valid = super().note(take, state, *args)
        if valid and state == PAUSED:
            self._on_pause(take.id)
        return valid

    def end(self, take: Take, *args: Any, **options: Any) -> bool:
        with _between(self._reach, "end", self._pool_of(take)):
            return super().end(take, *args, **options)

    def put_back(self, take: Take, *args: Any) -> bool:
        with _between(self._reach, "end", self._pool_of(take)):
            return super().put_back(take, *args)

    def _pool_of(self, take: Take) -> list[str]:
        record = self.find(take.id)
        return [] if record is None else [record.pool]


@contextlib.contextmanager
def _between(reach: Reach, step: str, queues: Sequence[str]) -> Iterator[None]:
    """Pass the fault points before and after a step for the first of these queues."""
    for queue in queues[:1]:
        reach(cast(Point, f"before-{step}"), queue)
    yield
    for queue in queues[:1]:
        reach(cast(Point, f"after-{step}"), queue)


class FaultyBroker(MemoryBroker):
    """The broker of one worker process."""

    def __init__(self, store: MemoryStore, app: str, reach: Reach) -> None:
        super().__init__(store, app)
        self.requests = _PointedRequests(self, reach)
        self.dead_letters = _PointedDeadLetters(self, reach)
        self._reach = reach

    def reader(self, queue: str, after: int) -> Any:
        return _PointedReader(super().reader(queue, after), queue, self._reach)


class _PointedDeadLetters(EmbeddedDeadLetters):
    def __init__(self, broker: MemoryBroker, reach: Reach) -> None:
        super().__init__(broker.tables)
        self._reach = reach

    def store(self, record: DeadLetterRecord) -> None:
        with _between(self._reach, "dead-letter", [record.queue]):
            super().store(record)


class _PointedReader:
    def __init__(self, reader: Reader, queue: str, reach: Reach) -> None:
        self._reader = reader
        self._queue = queue
        self._reach = reach

    def fetch(self, limit: int) -> Iterable[Row]:
        with _between(self._reach, "fetch", [self._queue]):
            return self._reader.fetch(limit)


class SendingBroker(MemoryBroker):
    """The broker to which `App.send` sends."""

    def __init__(
        self, store: MemoryStore, app: str, reach: Reach, on_pause: Callable[[str], None]
    ) -> None:
        super().__init__(store, app)
        self._reach = reach
        self._staged = StagedMessages()
        self._requests = _PointedRequests(self, reach, on_pause, self._staged)
        self.requests = self._requests

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        self.deliver()
        with _between(self._reach, "send", [each.queue for each in messages]):
            return super().send_many(messages)

    def send_within(self, connection: Any, messages: Sequence[Outgoing]) -> list[str]:
        for message in messages:
            self.checked_size(message)
        with _between(self._reach, "send", [each.queue for each in messages]):
            ids = [self.writer.store.new_id() for _ in messages]
            pairs = zip(messages, ids, strict=True)
            staged = [replace(m, headers=with_header(m.headers, qdo_id=id)) for m, id in pairs]
            if staged:
                self._staged.stage(connection, staged)
            return ids

    def deliver(self) -> bool:
        """Store the messages and requests of committed transactions; return True if there are."""
        found = self._staged.committed()
        super().send_many([each for each in found if isinstance(each, Outgoing)])
        requests = [each for each in found if isinstance(each, NewRequest)]
        if requests:
            self._requests.store(requests)
        return bool(found)

    def disconnect(self) -> None:
        self._staged.close()

    def close(self) -> None:
        """Do nothing, because after `App.close` the app can still send to an open kit."""
