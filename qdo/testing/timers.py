"""The timers of an app under test: the clock of the kit sends their messages."""

from __future__ import annotations

from collections.abc import Callable

from qdo.app import App
from qdo.brokers.catalog import Backlog
from qdo.sending.timers import send_occurrences
from qdo.testing.clock import TOLERANCE_SECONDS, Clock


class KitTimers:
    """Sends occurrences from the time at which the kit is opened.

    :param clock: the clock of the kit.
    :param backlog: returns what waits in a queue.
    """

    def __init__(self, app: App, clock: Clock, backlog: Callable[[str], Backlog]) -> None:
        self._app = app
        self._clock = clock
        self._backlog = backlog
        self._sent_until = clock.now

    def next_due(self) -> float | None:
        """Return the Unix time of the next occurrence, None without timers."""
        return min((e.after(self._sent_until) for e in self._app.timers.values()), default=None)

    def send(self) -> bool:
        """Send what is due; return whether anything was sent."""
        begin, self._sent_until = self._sent_until, self._clock.now + TOLERANCE_SECONDS
        due = []
        for timer in self._app.timers.values():
            occurrence, waits = timer.due(begin, self._sent_until), self._backlog(timer.queue)
            is_held = timer.unless_waiting and (waits.count or waits.delayed)
            if occurrence is not None and occurrence.sends and not is_held:
                due.append((timer, occurrence))
        send_occurrences(self._app, due)
        return bool(due)
