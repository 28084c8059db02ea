"""Hosts, users and processes as znodes show them; the setting `hide` leaves names out."""

from __future__ import annotations

import os
import platform
import socket
import time
from typing import Any

from qdo._version import FORMAT_LEVEL, __version__
from qdo.fleet.names import writer
from qdo.settings.settings import Settings

HIDDEN_HOST = "hidden"


def host_shown(settings: Settings) -> str:
    """Return the name of this host."""
    return HIDDEN_HOST if "hosts" in settings.hide else socket.gethostname()


def writer_shown(settings: Settings) -> str:
    """Return who this process is: user and host."""
    return HIDDEN_HOST if "hosts" in settings.hide else writer()


def describe_process(settings: Settings) -> dict[str, Any]:
    """Return the part of this process's component node that does not change.

    It describes a worker, and every other process with a session that owns nodes.
    """
    return {
        "host": host_shown(settings),
        "pid": os.getpid(),
        "version": __version__,
        "python": platform.python_version(),
        "level": FORMAT_LEVEL,
        "zone": settings.zone,
        "settings": settings.digest(),
        "started": time.time(),
    }
