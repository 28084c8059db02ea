"""Limits the messages of a worker: the setting `max_messages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gevent

from qdo.message import Batch, Message
from qdo.worker.executors.base import Executor, JobCall, NotStarted, OnStart

if TYPE_CHECKING:
    from qdo.jobs.job import Job


class LimitedExecutor(Executor):
    """Starts jobs of another executor for a limited number of messages.

    :param most: the number of messages.
    :param on_reached: called on the event loop when the jobs of all these messages have started;
        it must not block. A drain that began earlier would keep the last ones from starting.
    """

    def __init__(self, inner: Executor, most: int, on_reached: Callable[[], None]) -> None:
        self._inner = inner
        self._left = most
        self._unstarted = most
        self._on_reached = on_reached
        self._loop = gevent.get_hub().loop

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return the inner call, counted; it raises NotStarted after the last message."""

        def started(message: Message) -> None:
            if on_start is not None:
                on_start(message)
            self._loop.run_callback_threadsafe(self._count_start, _count(message))

        inner = self._inner.bind(job, started)

        def call(message: Message, context: Any) -> None:
            if self._left <= 0:
                raise NotStarted
            count = _count(message)
            self._left -= count
            try:
                inner(message, context)
            except NotStarted:
                self._left += count
                raise

        return call

    def _count_start(self, count: int) -> None:
        self._unstarted -= count
        if self._unstarted <= 0:
            self._on_reached()

    def decodes(self, job: Job) -> bool:
        """Return what the inner executor says."""
        return self._inner.decodes(job)

    def under_way(self) -> int:
        """Return how many jobs are running outside the event loop's thread."""
        return self._inner.under_way()

    def close(self) -> None:
        """Close the inner executor."""
        self._inner.close()


def _count(message: Message | Batch) -> int:
    """Return how many messages a call is for: a batch may exceed the limit."""
    return len(message) if isinstance(message, Batch) else 1
