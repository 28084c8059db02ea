"""Wakes other processes of this machine through named pipes, without polling.

Each listener creates a FIFO in a shared folder. A notification writes one byte into every FIFO
there. It carries no data: the change is in the database. A notification to a full pipe may be
dropped, because an earlier one is still unread. The next notification removes a FIFO whose
listener died.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid

log = logging.getLogger(__name__)

_WRITE = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC


class WakeupPipe:
    """A listener's end: `fileno()` becomes readable when another process notifies it."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._path = os.path.join(folder, self.name)
        hidden = os.path.join(folder, f".{self.name}")
        os.mkfifo(hidden, 0o600)
        # Opened for reading and writing: the pipe always has a writer, and is readable only when
        # it contains a byte. Renamed only once it is open: a notification treats a FIFO without
        # a reader as a dead listener's and removes it.
        self._fd = os.open(hidden, _READ)
        os.rename(hidden, self._path)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._fd

    def drain(self) -> None:
        """Discard all pending notifications; call it before reading the changes."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, 4096)) == 4096:
                pass

    def ring_self(self) -> None:
        """Wake only this listener, for instance to end it."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._fd, b"!")

    def close(self) -> None:
        """Remove the FIFO; idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def notify_all(folder: str, *, skip: WakeupPipe | None = None) -> None:
    """Wake every listener of `folder` except `skip`.

    Never blocks and never raises: the change is already stored. A missing folder has no
    listeners. A listener that cannot be reached sees the change at its next check.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror
        log.warning("cannot notify listeners in %s (%s); they see the change later", folder, reason)
        return
    for name in names:
        if not name.startswith(".") and (skip is None or name != skip.name):
            path = os.path.join(folder, name)
            try:
                _notify_one(path)
            except OSError as error:
                log.warning("cannot notify %s (%s); it sees the change later", path, error.strerror)


def _notify_one(path: str) -> None:
    try:
        fd = os.open(path, _WRITE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no process has it open for reading: its listener died
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        elif error.errno != errno.ENOENT:
            raise
        return
    try:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b"!")
    finally:
        os.close(fd)
