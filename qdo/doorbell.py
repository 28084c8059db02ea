"""Waking other processes of this machine through named pipes, without polling.

A listener makes a FIFO of its own in a folder that all parties know; ringing writes one
byte into every FIFO there. A ring carries no data: what changed stands in the database, so
a ring that meets a full pipe may be dropped (one is already waiting to be read), and a FIFO
whose listener died is removed by the next ring.
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


class Doorbell:
    """A listener's end: `fileno()` becomes readable when somebody rings."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._path = os.path.join(folder, self.name)
        hidden = os.path.join(folder, f".{self.name}")
        os.mkfifo(hidden, 0o600)
        # Opened for reading and writing: the pipe never sees its last writer leave, so it
        # is readable only when there is a byte. Named only once it is open: a ring takes a
        # FIFO that nobody reads for a dead listener's and removes it.
        self._fd = os.open(hidden, _READ)
        os.rename(hidden, self._path)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._fd

    def drain(self) -> None:
        """Take all waiting rings; call it before looking at what changed."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, 4096)) == 4096:
                pass

    def ring_self(self) -> None:
        """Wake this listener only, for instance to end it."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._fd, b"!")

    def close(self) -> None:
        """Remove the FIFO; idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def ring(folder: str, *, skip: Doorbell | None = None) -> None:
    """Wake every listener of `folder` but `skip`.

    Never blocks and never raises: what is rung for has happened. A missing folder is nobody;
    a listener that cannot be reached finds out by its next look.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("cannot ring in %s (%s); listeners notice later", folder, error.strerror)
        return
    for name in names:
        if not name.startswith(".") and (skip is None or name != skip.name):
            path = os.path.join(folder, name)
            try:
                _ring_one(path)
            except OSError as error:
                log.warning("cannot ring %s (%s); it notices later", path, error.strerror)


def _ring_one(path: str) -> None:
    try:
        fd = os.open(path, _WRITE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nobody has it open for reading: its process is gone
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
