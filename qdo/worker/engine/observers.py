"""Reports how attempts end to an app's observers and to the history; costs nothing without."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from qdo.events import Event, OutcomeName
from qdo.history.recorder import Recorder
from qdo.message import Message
from qdo.worker.executors.base import JobAborted, JobCall

Observer = Callable[[Event], Any]

_log = logging.getLogger(__name__)


class Observers:
    """The observers of one worker process.

    :ivar workers: name of the worker node by owned queue; maintained only with observers.
    :ivar history: counts for the history, None without one.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        clock: Callable[[], float] = time.perf_counter,
        history: Recorder | None = None,
    ) -> None:
        self.history = history
        self.workers: dict[str, str] = {}
        self._observers = tuple(observers)
        self._clock = clock
        self._began: dict[tuple[str, int], float] = {}

    def __bool__(self) -> bool:
        return bool(self._observers)

    def bind(self, call: JobCall) -> JobCall:
        """Return the call for the pipeline to make; without observers, `call` itself."""
        if self.history is not None:
            call = self.history.bind(call)
        if not self._observers:
            return call
        began, clock = self._began, self._clock

        def observed(message: Message, context: Any) -> None:
            began[message.queue, message.position] = clock()
            call(message, context)
            self.report(message, "done", None)

        return observed

    def bind_batch(self, call: JobCall) -> JobCall:
        """Return the call of a job that takes batches; without a history, `call` itself."""
        return call if self.history is None else self.history.bind_batch(call)

    def batch_done(self, messages: list[Message]) -> None:
        """Report messages of a batch that are done."""
        if self.history is not None:
            self.history.batch_done(messages)
        if self._observers:
            for message in messages:
                self.report(message, "done", None)

    def report(self, message: Message, outcome: OutcomeName, error: str | None) -> None:
        """Report a finished attempt to every observer; their own errors are only logged."""
        if self.history is not None and outcome != "done":
            self.history.ended(message, outcome, error)
        if not self._observers:
            return
        began = self._began.pop((message.queue, message.position), None)
        event = Event(
            message.queue,
            message.id,
            message.position,
            message.attempt,
            outcome,
            error,
            0.0 if began is None else self._clock() - began,
            self.workers.get(message.queue, ""),
        )
        for observer in self._observers:
            try:
                observer(event)
            except JobAborted:
                raise
            except BaseException:  # noqa: BLE001 - an app's hook must not end the worker
                _log.exception("queue %s: an observer raised an error", event.queue)
