"""The duty "limit": ends a worker after `max_seconds`."""

from __future__ import annotations

from collections.abc import Callable

import gevent

from qdo.worker.duties.runner import Duty


class TimeLimit(Duty):
    """Ends the worker once it has run for `seconds`.

    :param finish: called with the reason when the time is over.
    """

    name = "limit"

    def __init__(self, seconds: float, finish: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._finish = finish

    def run(self) -> None:
        gevent.sleep(self._seconds)
        self._finish(f"max_seconds reached: this worker has run for {self._seconds:g} s")
