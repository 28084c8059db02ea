"""The duty "timers": makes queues ready again when their delay is over."""

from __future__ import annotations

from gevent.event import Event

from qdo.system.clock import clock
from qdo.worker.duties.runner import Duty
from qdo.worker.engine.dispatcher import Dispatcher


class QueueTimers(Duty):
    """Ticks the dispatcher whenever a queue is due.

    :param changed: set by the dispatcher when the next due time may have become earlier.
    """

    name = "timers"
    ends_at_drain = False

    def __init__(self, dispatcher: Dispatcher, changed: Event) -> None:
        self._dispatcher = dispatcher
        self._changed = changed

    def run(self) -> None:
        while True:
            self._dispatcher.tick()
            due = self._dispatcher.due()
            self._changed.wait(None if due == float("inf") else max(0.0, due - clock()))
            self._changed.clear()
