"""Names of hosts and users as znodes show them: the setting `hide`."""

from __future__ import annotations

import socket

from qdo.fleet.names import writer
from qdo.settings.settings import Settings

HIDDEN_HOST = "hidden"


def host_shown(settings: Settings) -> str:
    """Return the name of this host."""
    return HIDDEN_HOST if "hosts" in settings.hide else socket.gethostname()


def writer_shown(settings: Settings) -> str:
    """Return who this process is: user and host."""
    return HIDDEN_HOST if "hosts" in settings.hide else writer()
