"""The boto3 session of this process, which all clients share."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

from qdo.errors import SettingsError

try:
    import boto3
except ImportError as error:
    raise SettingsError(
        name="broker", reason="sqs:// and kinesis:// need boto3: pip install 'qdo[aws]'"
    ) from error

_lock = threading.Lock()
_sessions: dict[int, Any] = {}
"""The session of this process by its process id: a fork must not share its parent's sockets."""


def _renew_lock() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def boto_session() -> Iterator[Any]:
    """Hold the lock and yield the session of this process."""
    with _lock:
        pid = os.getpid()
        if pid not in _sessions:
            _sessions.clear()
            _sessions[pid] = boto3.Session()
        yield _sessions[pid]


@functools.cache
def regions() -> tuple[str, ...]:
    """Return the regions that this version of boto3 knows."""
    with boto_session() as session:
        found = {
            region
            for partition in session.get_available_partitions()
            for region in session.get_available_regions("sqs", partition)
        }
    return tuple(sorted(found))
