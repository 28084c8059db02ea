"""Limits the log lines about one queue: ten messages that fail a thousand times a second must not
fill the disk, nor hide the lines about other queues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import gevent

LINES = 10
"""Lines about one queue in one second."""
WINDOW_SECONDS = 1.0
LOGGERS = tuple(f"qdo.worker.engine.{name}" for name in ("outcomes", "batches", "resume"))
"""Loggers with lines about single messages. The first argument of each line names the queue."""

_KEPT = 1000
_MORE = "%s: and %d more lines within a second, up to level %s"


class _Window:
    __slots__ = ("begun", "left_out", "level", "lines")

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.lines = self.left_out = self.level = 0


class QueueLineLimit(logging.Filter):
    """Passes the first lines about a queue in each second, and then one with the number left out.

    :param clock: seconds on a monotonic clock.
    :param later: calls a function after some seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[..., Any] = gevent.spawn_later,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._later = later
        self._windows: dict[str, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        if record.msg is _MORE or not isinstance(arguments, tuple) or not arguments:
            return True
        now, name = self._clock(), str(arguments[0])
        window = self._windows.get(name)
        if window is None or not 0 <= now - window.begun < WINDOW_SECONDS:
            self._forget(now)
            window = self._windows[name] = _Window(now)
        window.lines += 1
        if window.lines <= LINES:
            return True
        if not window.left_out:
            logger = logging.getLogger(record.name)
            self._later(WINDOW_SECONDS - (now - window.begun), self._report, logger, name, window)
        window.left_out += 1
        window.level = max(window.level, record.levelno)
        return False

    def _forget(self, now: float) -> None:
        """Drop the windows of quiet queues, of which there may be many thousands."""
        if len(self._windows) >= _KEPT:
            self._windows = {
                name: window
                for name, window in self._windows.items()
                if now - window.begun < WINDOW_SECONDS
            }

    def _report(self, logger: logging.Logger, name: str, window: _Window) -> None:
        level = logging.getLevelName(window.level)
        logger.log(window.level, _MORE, name, window.left_out, level)


def limit_lines() -> None:
    """Limit the lines about single messages in this process."""
    limit = QueueLineLimit()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(limit)
