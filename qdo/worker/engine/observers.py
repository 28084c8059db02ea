"""Report the ends of attempts to an app's observers, the history and the metrics.

Without observers, history and metrics, reporting costs nothing per message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from qdo.callables import check_done
from qdo.history.recorder import Recorder
from qdo.message import Message
from qdo.outcomes import Event, OutcomeName
from qdo.worker.engine.meters import JobMeters
from qdo.worker.executors.base import JobAborted, JobCall

Observer = Callable[[Event], Any]

_log = logging.getLogger(__name__)


class Observers:
    """The observers of one worker process.

    :ivar workers: name of the worker node, by owned queue; empty without observers.
    :ivar history: counts for the history; None without a history.
    :ivar meters: counts for the metrics; None without metrics.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        clock: Callable[[], float] = time.perf_counter,
        history: Recorder | None = None,
        meters: JobMeters | None = None,
    ) -> None:
        self.history = history
        self.meters = meters
        self.workers: dict[str, str] = {}
        self._observers = tuple(observers)
        self._clock = clock
        self._began: dict[tuple[str, int], float] = {}

    def __bool__(self) -> bool:
        return bool(self._observers)

    def bind(self, call: JobCall) -> JobCall:
        """Wrap a call to report its attempts; without observers and history, return `call`."""
        if self.history is not None:
            call = self.history.bind(call)
        if not self._observers:
            return call
        began = self._began
        clock = self._clock

        def observed(message: Message, context: Any) -> None:
            began[message.queue, message.position] = clock()
            call(message, context)
            self.report(message, "done", None)

        return observed

    def bind_batch(self, call: JobCall, glob: str) -> JobCall:
        """Return the call of a batch job for the queues of a glob."""
        if self.history is not None:
            call = self.history.bind_batch(call)
        return call if self.meters is None else self.meters.of(glob).bind_batch(call)

    def batch_done(self, messages: list[Message]) -> None:
        """Report the done messages of a batch."""
        if self.history is not None:
            self.history.batch_done(messages)
        if self._observers:
            for message in messages:
                self.report(message, "done", None)

    def report(self, message: Message, outcome: OutcomeName, error: str | None) -> None:
        """Report an ended attempt to every observer; log the errors of observers."""
        # The bound call or the turn has already counted a done attempt.
        if self.history is not None and outcome != "done":
            self.history.ended(message, outcome, error)
        if self.meters is not None and outcome != "done":
            self.meters.ended(message, outcome)
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
                check_done(observer(event), observer, "observer")
            except JobAborted:
                raise
            except BaseException:  # noqa: BLE001 - an app's hook must not end the worker
                _log.exception(
                    "queue %s: an observer raised an error; its message is not affected",
                    event.queue,
                )
