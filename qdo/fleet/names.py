"""Names of what the processes of an app share, and of those who write it."""

from __future__ import annotations

import functools
import getpass
import os
import socket

from qdo.fleet_errors import SharedNameError
from qdo.queues import name_error


def checked_name(what: str, name: str) -> str:
    """Return a name; raise SharedNameError if no node can have it."""
    reason = name_error(name) if type(name) is str else f"it is a {type(name).__name__}"
    if reason:
        raise SharedNameError(what=what, name=name, reason=reason)
    return name


@functools.cache
def writer() -> str:
    """Return who writes: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
