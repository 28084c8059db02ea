"""Ends a worker after so many messages: the setting `max_messages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qdo.message import Batch, Message
from qdo.worker.executors.base import Executor, JobCall, NotStarted

if TYPE_CHECKING:
    from qdo.app import Job


class LimitedExecutor(Executor):
    """Another executor that starts jobs so many times and no more.

    :param on_reached: called when the last one was started; it must not block.
    """

    def __init__(self, inner: Executor, most: int, on_reached: Callable[[], None]) -> None:
        self._inner = inner
        self._left = most
        self._on_reached = on_reached

    def bind(self, job: Job) -> JobCall:
        """Return the inner call, counted; it raises NotStarted once none is left."""
        inner = self._inner.bind(job)

        def call(message: Message, context: Any) -> None:
            if self._left <= 0:
                raise NotStarted
            # A batch counts as what is in it, and may be more than was left.
            given: Message | Batch = message
            count = len(given) if isinstance(given, Batch) else 1
            self._left -= count
            if self._left <= 0:
                self._on_reached()
            try:
                inner(message, context)
            except NotStarted:
                self._left += count
                raise

        return call

    def under_way(self) -> int:
        """Return how many jobs run outside the event loop's thread."""
        return self._inner.under_way()

    def close(self) -> None:
        """End the inner executor."""
        self._inner.close()
