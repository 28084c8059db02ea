"""The timers of an app under test: the clock of the kit sends their messages."""

from __future__ import annotations

from collections.abc import Callable

from qdo.app import App
from qdo.brokers.catalog import Backlog
from qdo.sending.timers import send_occurrences
from qdo.testing.clock import TOLERANCE_SECONDS, Clock


class KitTimers:
    """Sends occurrences from the time at which the kit first sees a timer.

    :param backlog: returns what waits in a queue.
    """

    def __init__(self, app: App, clock: Clock, backlog: Callable[[str], Backlog]) -> None:
        self._app = app
        self._clock = clock
        self._backlog = backlog
        self._last: dict[str, int] = {}
        self.next_due()

    def next_due(self) -> float | None:
        """Return the Unix time of the next occurrence, None without timers."""
        now = int(self._clock.now)
        dues = [
            timer.after(self._last.setdefault(name, now))
            for name, timer in self._app.timers.items()
        ]
        return min(dues, default=None)

    def send(self) -> bool:
        """Send what is due; return whether anything was sent."""
        due = []
        for name, timer in self._app.timers.items():
            last = self._last.setdefault(name, int(self._clock.now))
            occurrence = timer.due(last, self._clock.now + TOLERANCE_SECONDS)
            if occurrence is None:
                continue
            self._last[name] = occurrence.at
            waits = timer.unless_waiting and self._backlog(timer.queue)
            if occurrence.sends and not (waits and (waits.count or waits.delayed)):
                due.append((timer, occurrence))
        send_occurrences(self._app, due)
        return bool(due)
