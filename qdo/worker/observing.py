"""Telling the observers of an app how attempts end; without any it costs nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from qdo.events import Event, OutcomeName
from qdo.message import Message
from qdo.worker.executors.base import JobCall
from qdo.worker.slot import JobAborted

Observer = Callable[[Event], Any]

_log = logging.getLogger(__name__)


class Observing:
    """The observers of one worker process.

    :ivar workers: name of the worker node by owned queue; kept up only where there are observers.
    """

    def __init__(
        self, observers: Sequence[Observer], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.workers: dict[str, str] = {}
        self._observers = tuple(observers)
        self._clock = clock
        self._began: dict[tuple[str, int], float] = {}

    def __bool__(self) -> bool:
        return bool(self._observers)

    def bind(self, call: JobCall) -> JobCall:
        """Return what the pipeline calls for every message: without observers `call` itself."""
        if not self._observers:
            return call
        began, clock = self._began, self._clock

        def observed(message: Message, context: Any) -> None:
            place = message.queue, message.position
            began[place] = clock()
            call(message, context)
            self.tell(message, "done", None)

        return observed

    def tell(self, message: Message, outcome: OutcomeName, error: str | None) -> None:
        """Tell every observer of an attempt that ended; their own errors are only logged."""
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
            except BaseException:  # noqa: BLE001 - a hook of the app must not end the worker
                _log.exception("queue %s: an observer raised an error itself", event.queue)
