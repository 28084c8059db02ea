"""Logging of qdo's processes: plain lines on stderr, one format for parents and children."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from qdo.errors import SettingsError
from qdo.text import describe, describe_traceback

LEVELS = ("debug", "info", "warning", "error")
REPEAT_SECONDS = 30.0
"""How long a repeated line of kazoo is suppressed."""

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s[%(process)d] %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"


class _Formatter(logging.Formatter):
    """Limits the length of tracebacks."""

    def formatException(self, ei: Any) -> str:
        error = ei[1]
        return super().formatException(ei) if error is None else describe_traceback(error).rstrip()


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `configure` adds, and replaces when it is called again."""


class RateLimitRepeats(logging.Filter):
    """Passes a repeated line of kazoo only now and then.

    While a coordinator is unreachable kazoo tries to connect twice a second, forever, and logs
    each attempt.

    :param clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] != "kazoo":
            return True
        now = self._clock()
        self._logged = {text: at for text, at in self._logged.items() if now - at < REPEAT_SECONDS}
        text = record.getMessage()
        if text in self._logged:
            return False
        self._logged[text] = now
        return True


def configure(level: str = "info", stream: TextIO | None = None, config: str = "") -> None:
    """Write the log of this process, from `level` up, to `stream` (default: stderr).

    :param config: JSON file for `logging.config.dictConfig`, which then applies on top.

    Times are UTC: the lines of several hosts can be sorted. kazoo and botocore log only warnings
    and worse, and repeated lines of kazoo appear only now and then. At level debug kazoo logs
    everything and botocore from info up. Below info, botocore logs every request that it signs,
    with the security token of temporary credentials.

    :raises SettingsError: the level does not exist, or the file cannot be used.
    """
    if level.lower() not in LEVELS:
        reason = f"must be one of {', '.join(LEVELS)}, got {level!r}"
        raise SettingsError(name="log_level", reason=reason)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    handler = _Handler(stream if stream is not None else sys.stderr)
    formatter = _Formatter(_FORMAT, _DATE_FORMAT)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    kazoo, botocore = logging.NOTSET, logging.INFO
    if level.lower() != "debug":
        kazoo = botocore = logging.WARNING
        handler.addFilter(RateLimitRepeats())
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("kazoo").setLevel(kazoo)
    logging.getLogger("botocore").setLevel(botocore)
    if config:
        _apply(config)


def _apply(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            given = json.load(file)
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **given})
    except Exception as error:
        # Also what the constructors of handlers and formatters raise.
        raise SettingsError(
            name="log_config", reason=f"cannot use {path}: {describe(error)}"
        ) from error
