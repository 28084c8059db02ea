"""Wakes other processes of the machine through named pipes, without polling.

Each listener creates a FIFO in a shared folder. A notification writes one byte into every FIFO in
the folder. The byte carries no data, because the change is in the database. If a pipe is full, its
listener has an unread notification and does not need another. The next notification removes a FIFO
whose listener has died.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import stat
import threading
import uuid
from collections.abc import Callable

from qdo.system.files import PRIVATE, Rights, make_folder, opened_folder
from qdo.system.native import guarded
from qdo.text import join_some

log = logging.getLogger(__name__)

_WRITE = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class WakeupPipe:
    """A listener's end of a pipe. `fileno()` becomes readable after a notification."""

    def __init__(self, folder: str, rights: Rights = PRIVATE) -> None:
        """Create the FIFO, and a missing folder, with `rights`."""
        make_folder(folder, rights)
        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._path = os.path.join(folder, self.name)
        # Open the pipe for reading and writing. The pipe then always has a writer, and is readable
        # only if it contains a byte. Rename the pipe after opening, because a notification assumes
        # that the listener of a FIFO without a reader has died.
        with opened_folder(folder) as at:
            os.mkfifo(f".{self.name}", 0o600, dir_fd=at)
            self._fd = os.open(f".{self.name}", _READ, dir_fd=at)
            rights.apply(self._fd)
            os.rename(f".{self.name}", self.name, src_dir_fd=at, dst_dir_fd=at)

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        """Discard all pending notifications. Call this method before reading the changes."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, 4096)) == 4096:
                pass

    def ring_self(self) -> None:
        """Wake only this listener, for example to end its thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._fd, b"!")

    def close(self) -> None:
        """Remove the FIFO. Further calls do nothing."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


class PipeThread:
    """A thread (a greenlet under gevent) that calls `step` after each notification.

    The constructor creates the pipe, so the thread notices every later change.

    :param step: a function that returns the maximum seconds until its next call.
    """

    def __init__(self, folder: str, rights: Rights, step: Callable[[], float]) -> None:
        self._pipe = WakeupPipe(folder, rights)
        self._step = step
        self.stopping = False
        self._closed = False
        self._closing = threading.Lock()  # `stop` must not notify a closed pipe
        self._thread = threading.Thread(
            target=guarded("doorbell", self._run), name="qdo-doorbell", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop calling `step`. Further calls do nothing."""
        self.stopping = True
        if self._thread.ident is None:
            self._pipe.close()
        elif self._thread.is_alive():
            with self._closing:
                if not self._closed:
                    self._pipe.ring_self()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN)
        try:
            while not self.stopping:
                # Round up. If the thread woke a moment too early, no message would be due.
                poll.poll(math.ceil(self._step() * 1000))
                self._pipe.drain()
        finally:
            with self._closing:
                self._closed = True
                self._pipe.close()


def notify_all(folder: str, *, skip: WakeupPipe | None = None) -> None:
    """Wake every listener of `folder` except `skip`.

    This function never blocks and never raises, because the change is already stored. An
    unreachable listener sees the change at its next check.
    """
    try:
        with opened_folder(folder) as at:
            unreached = _notify(os.listdir(at), at, None if skip is None else skip.name)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror
        log.warning(
            "cannot notify listeners in %s (%s); the listeners see the change at their next check",
            folder,
            reason,
        )
        return
    if unreached:
        names = join_some([f"{name} ({reason})" for name, reason in unreached.items()], 3)
        log.warning(
            "cannot notify in %s: %s; the listeners see the change at their next check",
            folder,
            names,
        )


def _notify(names: list[str], folder: int, skipped: str | None) -> dict[str, str | None]:
    """Notify listeners; return the unreachable listeners, with the reasons."""
    unreached = {}
    for name in names:
        if not name.startswith(".") and name != skipped:
            try:
                _notify_one(name, folder)
            except OSError as error:
                unreached[name] = error.strerror
    return unreached


def _notify_one(name: str, folder: int) -> None:
    try:
        fd = os.open(name, _WRITE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no process reads the pipe, so the listener has died
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        elif error.errno != errno.ENOENT:
            raise
        return
    try:
        # Other users may have put a file, or a link to a file, into the folder.
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a FIFO")
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b"!")
    finally:
        os.close(fd)
