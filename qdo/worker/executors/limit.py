"""Limits the messages of a worker: the setting `max_messages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qdo.message import Batch, Message
from qdo.worker.executors.base import Executor, JobCall, NotStarted

if TYPE_CHECKING:
    from qdo.jobs.job import Job


class LimitedExecutor(Executor):
    """Starts jobs of another executor for a limited number of messages.

    :param most: the number of messages.
    :param on_reached: called when the last message was started; it must not block.
    """

    def __init__(self, inner: Executor, most: int, on_reached: Callable[[], None]) -> None:
        self._inner = inner
        self._left = most
        self._on_reached = on_reached

    def bind(self, job: Job) -> JobCall:
        """Return the inner call, counted; it raises NotStarted after the last message."""
        inner = self._inner.bind(job)

        def call(message: Message, context: Any) -> None:
            if self._left <= 0:
                raise NotStarted
            # A batch counts each of its messages, and may exceed the limit.
            argument: Message | Batch = message
            count = len(argument) if isinstance(argument, Batch) else 1
            self._left -= count
            if self._left <= 0:
                self._on_reached()
            try:
                inner(message, context)
            except NotStarted:
                self._left += count
                raise

        return call

    def decodes(self, job: Job) -> bool:
        """Return what the inner executor says."""
        return self._inner.decodes(job)

    def under_way(self) -> int:
        """Return how many jobs are running outside the event loop's thread."""
        return self._inner.under_way()

    def close(self) -> None:
        """Close the inner executor."""
        self._inner.close()
