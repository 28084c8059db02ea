"""Wrappers of an app and its broker, with fault points before and after their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from qdo.app import App
from qdo.brokers.base import Outgoing
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.subscription import Reader
from qdo.events import Event
from qdo.jobs.hooks import FailureHook, Hooks, Observer
from qdo.message import Message
from qdo.testing.fault_points import Point
from qdo.testing.memory_broker import Contents, MemoryBroker, MemoryDeadLetters, MemoryStore
from qdo.worker.engine.prefetch import Row

Reach: TypeAlias = Callable[[Point, str], None]
"""Passes a fault point of a queue."""


class FaultPoints(Protocol):
    """The process that an app runs in."""

    def reach(self, point: Point, queue: str) -> None: ...

    def ended(self, event: Event) -> None: ...


class InstrumentedApp:
    """The app as the engine sees it: with one more observer, and fault points around a hook."""

    def __init__(self, app: App, process: FaultPoints) -> None:
        self._app = app
        self.hooks = InstrumentedHooks(app.hooks, process)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)


class InstrumentedHooks:
    """The hooks of an `InstrumentedApp`."""

    def __init__(self, hooks: Hooks, process: FaultPoints) -> None:
        self._hooks = hooks
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    @property
    def observers(self) -> tuple[Observer, ...]:
        return (self._process.ended, *self._hooks.observers)

    @property
    def job_failure(self) -> FailureHook:
        hook, reach = self._hooks.job_failure, self._process.reach

        def call(message: Message, context: Any, error: BaseException) -> None:
            reach("before-job-failure", message.queue)
            hook(message, context, error)
            reach("after-job-failure", message.queue)

        return call


class FaultyBroker(MemoryBroker):
    """The broker of one worker process."""

    def __init__(self, store: MemoryStore, app: str, reach: Reach) -> None:
        super().__init__(store, app)
        self.dead_letters = _PointedDeadLetters(store, store.contents[app], reach)
        self._reach = reach

    def reader(self, queue: str, after: int) -> Any:
        return _PointedReader(super().reader(queue, after), queue, self._reach)


class _PointedDeadLetters(MemoryDeadLetters):
    def __init__(self, store: MemoryStore, contents: Contents, reach: Reach) -> None:
        super().__init__(store, contents)
        self._reach = reach

    def store(self, record: DeadLetterRecord) -> None:
        self._reach("before-dead-letter", record.queue)
        super().store(record)
        self._reach("after-dead-letter", record.queue)


class _PointedReader:
    def __init__(self, reader: Reader, queue: str, reach: Reach) -> None:
        self._reader = reader
        self._queue = queue
        self._reach = reach

    def fetch(self, limit: int) -> Iterable[Row]:
        self._reach("before-fetch", self._queue)
        rows = self._reader.fetch(limit)
        self._reach("after-fetch", self._queue)
        return rows

    def close(self) -> None:
        self._reader.close()


class SendingBroker(MemoryBroker):
    """The broker that `App.send` sends to."""

    def __init__(self, store: MemoryStore, app: str, reach: Callable[[Point, str], None]) -> None:
        super().__init__(store, app)
        self._reach = reach

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        queues = [message.queue for message in messages]
        for queue in queues[:1]:
            self._reach("before-send", queue)
        ids = super().send_many(messages)
        for queue in queues[:1]:
            self._reach("after-send", queue)
        return ids

    def close(self) -> None:
        """Stay open: after `App.close`, the app still sends to the kit while the kit is open."""
