"""Limit the rate of log lines for each queue and each sentence.

With a limit, messages that fail a thousand times a second neither fill the disk nor hide the lines
about other queues. Thousands of queues with an unreachable broker share one limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import gevent

# Maximum number of lines about one queue in one second.
LINES = 10
# Maximum number of lines with the same sentence in one second, about all queues.
LIKE_LINES = 100
WINDOW_SECONDS = 1.0
# Loggers with lines about single messages. The first argument of each line names the queue.
MESSAGE_LOGGERS = (
    *(
        f"qdo.worker.engine.{name}"
        for name in ("outcomes", "queue_ends", "request_ends", "batches", "observers")
    ),
    "qdo.worker.engine.subscriptions",
    "qdo.worker.runs",
)
# Loggers with lines about single queues. A worker may own many thousands of queues.
QUEUE_LOGGERS = (
    "qdo.worker.engine.jobs",
    *(f"qdo.worker.duties.{name}" for name in ("queues", "retention")),
    *(f"qdo.coordination.protocol.{name}" for name in ("acquisition", "owned_queues")),
    "qdo.coordination.protocol.rebalancer",
)
# Loggers with lines about a failing broker or a thread that cannot start. Without a limit, every
# queue would repeat these lines every 5 s.
BROKER_LOGGERS = (
    "qdo.worker.engine.ends.broker",
    "qdo.brokers.kinesis.reader",
    "qdo.brokers.sqs.api",
    "qdo.brokers.sqs.receive",
    "qdo.worker.executors.wait",
)

_KEPT = 1000
_MORE = "%s: and %d more lines within a second, up to level %s"


class _Window:
    __slots__ = ("begun", "left_out", "level", "lines")

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.lines = self.left_out = self.level = 0


def queue_of(record: logging.LogRecord) -> str:
    """Return the queue that a line of `MESSAGE_LOGGERS` names first."""
    return str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""


def sentence_of(record: logging.LogRecord) -> str:
    """Return the text of a line without its arguments; "" if it has no arguments."""
    return str(record.msg) if record.args else ""


class LineLimit(logging.Filter):
    """Passes the first `most` lines of a kind in each second, then reports the number of others.

    :param kind: returns the key by which the filter counts a line; "" for an unlimited line.
    """

    def __init__(
        self,
        kind: Callable[[logging.LogRecord], str],
        most: int,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[..., Any] = gevent.spawn_later,
    ) -> None:
        super().__init__()
        self._kind = kind
        self._most = most
        self._clock = clock
        self._later = later
        self._windows: dict[str, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        name = "" if record.msg is _MORE else self._kind(record)
        if not name:
            return True
        now = self._clock()
        window = self._windows.get(name)
        if window is None or not 0 <= now - window.begun < WINDOW_SECONDS:
            self._forget(now)
            window = self._windows[name] = _Window(now)
        window.lines += 1
        if window.lines <= self._most:
            return True
        if not window.left_out:
            shown = name if self._kind is queue_of else f"lines like {record.getMessage()!r}"
            logger = logging.getLogger(record.name)
            self._later(WINDOW_SECONDS - (now - window.begun), _report, logger, shown, window)
        window.left_out += 1
        window.level = max(window.level, record.levelno)
        return False

    def _forget(self, now: float) -> None:
        # Forget old windows, because there may be many thousands of quiet queues.
        if len(self._windows) >= _KEPT:
            self._windows = {
                name: window
                for name, window in self._windows.items()
                if now - window.begun < WINDOW_SECONDS
            }


def _report(logger: logging.Logger, name: str, window: _Window) -> None:
    level = logging.getLevelName(window.level)
    logger.log(window.level, _MORE, name, window.left_out, level)


def limit_lines() -> None:
    """Limit the lines about single messages and queues in this process."""
    by_queue = LineLimit(queue_of, LINES)
    by_sentence = LineLimit(sentence_of, LIKE_LINES)
    for name in MESSAGE_LOGGERS:
        logging.getLogger(name).addFilter(by_queue)
    for name in (*MESSAGE_LOGGERS, *QUEUE_LOGGERS):
        logging.getLogger(name).addFilter(by_sentence)
    of_brokers = LineLimit(sentence_of, LINES)
    for name in BROKER_LOGGERS:
        logging.getLogger(name).addFilter(of_brokers)
