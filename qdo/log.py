"""How qdo's processes log: plain lines on stderr, one format for parents and children."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from qdo.errors import SettingsError

LEVELS = ("debug", "info", "warning", "error")
REPEAT_SECONDS = 30.0
"""How long a line that kazoo keeps repeating is left out."""

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s[%(process)d] %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"


class _Handler(logging.StreamHandler[TextIO]):
    """Marks the handler that `configure` put up, so that calling it again replaces it."""


class Calm(logging.Filter):
    """Lets a line of kazoo's pass once in a while, not with every attempt to connect.

    While a coordinator is away kazoo tries twice a second, for ever, and says so each time.

    :param clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] != "kazoo":
            return True
        now = self._clock()
        self._said = {text: at for text, at in self._said.items() if now - at < REPEAT_SECONDS}
        text = record.getMessage()
        if text in self._said:
            return False
        self._said[text] = now
        return True


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send the log of this process to `stream` (default: stderr), from `level` on.

    Times are UTC, so that the lines of several hosts sort. Of kazoo's and botocore's own lines
    only warnings and worse are shown, and kazoo's repeated ones now and then. At level debug all
    of kazoo's are, and botocore's down to info: below it writes every request that it signs, with
    the security token of temporary credentials.

    :raises SettingsError: for a level that does not exist.
    """
    if level.lower() not in LEVELS:
        raise SettingsError(name="log_level", reason=f"{level!r} is none of {', '.join(LEVELS)}")
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    handler = _Handler(stream if stream is not None else sys.stderr)
    formatter = logging.Formatter(_FORMAT, _DATE_FORMAT)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    kazoo, botocore = logging.NOTSET, logging.INFO
    if level.lower() != "debug":
        kazoo = botocore = logging.WARNING
        handler.addFilter(Calm())
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("kazoo").setLevel(kazoo)
    logging.getLogger("botocore").setLevel(botocore)
