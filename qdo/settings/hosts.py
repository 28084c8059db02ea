"""The public description of an app's processes, and the rights of their shared files.

The setting `hide` omits the names of hosts and users.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator
from typing import Any

from qdo._version import FORMAT_LEVEL, __version__
from qdo.fleet.names import writer
from qdo.settings.settings import Settings
from qdo.system.files import rights_problems, share_database, sqlite_path
from qdo.system.sqlite import translated

HIDDEN_HOST = "hidden"


def host_shown(settings: Settings) -> str:
    return HIDDEN_HOST if "hosts" in settings.hide else socket.gethostname()


def writer_shown(settings: Settings) -> str:
    return HIDDEN_HOST if "hosts" in settings.hide else writer()


def describe_process(settings: Settings) -> dict[str, Any]:
    """Return the constant part of this process's component node."""
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


def share_files(settings: Settings) -> None:
    """Create missing files of broker and coordinator, with the setting `group`.

    Raise SettingsError if the user is not in the group, or DatabaseError if a file cannot be
    created.
    """
    # Without a group, opening a file creates it for this user only.
    if settings.group:
        for path in _paths(settings):
            with translated(path):
                share_database(path, settings.group)


def file_warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings about the rights of existing files."""
    for path in _paths(settings):
        with translated(path):
            yield from rights_problems(path, settings.group)


def _paths(settings: Settings) -> Iterator[str]:
    for address in (settings.broker, settings.coordinator.partition("?chroot=")[0]):
        path = sqlite_path(address)
        if path is not None:
            yield path


def process_title(role: str, settings: Settings, target: str | None) -> str:
    """Return the last part of a process's command line, which describes the process."""
    named = target or settings.job
    return f"{role} of {named} (app {settings.app})" if settings.app else f"{role} of {named}"
