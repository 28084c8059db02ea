"""What stands between the engine and an app: the same, with fault points before and behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from qdo.app import App, FailureHook, Observer
from qdo.brokers.base import DeadLetterRecord, Outgoing
from qdo.brokers.subscription import Reader
from qdo.events import Event
from qdo.message import Message
from qdo.testing.broker import MemoryBroker, MemoryStore
from qdo.testing.faults import Point
from qdo.worker.fetching import Row

Reach: TypeAlias = Callable[[Point, str], None]
"""Passes a fault point of a queue."""


class Stage(Protocol):
    """The process that an app runs in."""

    def reach(self, point: Point, queue: str) -> None: ...

    def ended(self, event: Event) -> None: ...


class Watched:
    """The app as the engine sees it: with an observer more, and fault points around hooks."""

    def __init__(self, app: App, process: Stage) -> None:
        self._app = app
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    @property
    def observers(self) -> tuple[Observer, ...]:
        return (self._process.ended, *self._app.observers)

    @property
    def job_failure(self) -> FailureHook:
        hook, reach = self._app.job_failure, self._process.reach

        def told(message: Message, context: Any, error: BaseException) -> None:
            reach("before-job-failure", message.queue)
            hook(message, context, error)
            reach("after-job-failure", message.queue)

        return told


class PointedBroker(MemoryBroker):
    """The broker of one process."""

    def __init__(self, store: MemoryStore, app: str, reach: Reach) -> None:
        super().__init__(store, app)
        self._reach = reach

    def reader(self, queue: str, after: int) -> Any:
        return _PointedReader(super().reader(queue, after), queue, self._reach)

    def bury(self, letter: DeadLetterRecord) -> None:
        self._reach("before-dead-letter", letter.queue)
        super().bury(letter)
        self._reach("after-dead-letter", letter.queue)


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
    """What `App.send` sends to."""

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
        """Stay open: an app that closes goes on sending to the kit while that is open."""
