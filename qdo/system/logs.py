"""Logging of qdo's processes: plain lines on stderr, one format for parents and children."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TextIO

from qdo.errors import SettingsError
from qdo.text import describe, describe_traceback, printable_lines

LEVELS = ("debug", "info", "warning", "error")

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s[%(process)d] %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
_HANDLER_NAME = "qdo.system.logs"
"""The handler that `configure` adds, and replaces when it is called again."""


_INDENT = "    "
"""Before each further line of a record: only a record of its own begins at the left margin."""


class LineFormatter(logging.Formatter):
    """Limits the length of tracebacks, and escapes what a terminal would interpret.

    Handlers that a `log_config` defines can name it as their formatter.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record), _INDENT)

    def formatException(self, ei: Any) -> str:
        error = ei[1]
        return super().formatException(ei) if error is None else describe_traceback(error).rstrip()


def configure(level: str = "info", stream: TextIO | None = None, config: str = "") -> None:
    """Write the log of this process, from `level` up, to `stream` (default: stderr).

    :param config: JSON file for `logging.config.dictConfig`, which then applies on top.

    Times are UTC: the lines of several hosts can be sorted. kazoo logs only errors, because qdo
    has its own line for each event, and botocore warnings and worse. At level debug kazoo logs
    everything and botocore from info up. Below info, botocore logs every request that it signs,
    with the security token of temporary credentials.

    :raises SettingsError: the level does not exist, or the file cannot be used.
    """
    if level.lower() not in LEVELS:
        reason = f"must be one of {', '.join(LEVELS)}, got {level!r}"
        raise SettingsError(name="log_level", reason=reason)
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.name == _HANDLER_NAME]:
        root.removeHandler(old)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.name = _HANDLER_NAME
    formatter = LineFormatter(_FORMAT, _DATE_FORMAT)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root.addHandler(handler)
    set_level(level)
    if config:
        _apply(config)


def set_level(level: str) -> Callable[[], None]:
    """Log from this level up, one of `LEVELS`; return a function that undoes it."""
    kazoo, botocore = logging.NOTSET, logging.INFO
    if level.lower() != "debug":
        kazoo, botocore = logging.ERROR, logging.WARNING
    loggers = [logging.getLogger(name) for name in (None, "kazoo", "botocore")]
    before = [each.level for each in loggers]
    levels = (logging.getLevelName(level.upper()), kazoo, botocore)

    def apply(wanted: Iterable[int]) -> None:
        for logger, each in zip(loggers, wanted, strict=True):
            logger.setLevel(each)

    apply(levels)
    # At debug it logs every path with its query, where addresses of webhooks have their secrets.
    logging.getLogger("urllib3").setLevel(logging.INFO)
    return partial(apply, before)


def escape_last_resort() -> None:
    """Format the warnings of a process that configures no log, such as a command."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())


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
