"""How qdo's processes log: plain lines on stderr, one format for parents and children."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from qdo.errors import SettingsError

LEVELS = ("debug", "info", "warning", "error")

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s[%(process)d] %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"


class _Handler(logging.StreamHandler[TextIO]):
    """Marks the handler that `configure` put up, so that calling it again replaces it."""


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send the log of this process to `stream` (default: stderr), from `level` on.

    Times are UTC, so that the lines of several hosts sort. kazoo's own words below a warning
    are shown at level debug only: it tells of every reconnection twice.

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
    root.addHandler(handler)
    root.setLevel(level.upper())
    quiet = logging.NOTSET if level.lower() == "debug" else logging.WARNING
    logging.getLogger("kazoo").setLevel(quiet)
