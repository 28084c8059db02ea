"""The metrics of a worker process, in memory shared with its parent.

The process writes them about once a second. The parent reads them when somebody asks, also those
of a process that hangs or has just died. Nothing waits for anything, and no loop is woken.

Layout: two halves, which are written in turn. Each has the number of the write (8 bytes), the
length and the CRC-32 of its content (4 bytes each), and JSON. A process may be killed within a
write, and its jobs may write anything: then the other half is the latest that is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import zlib
from typing import Any

from qdo.worker.shared_memory.in_flight import make_memory

HALF_BYTES = 1 << 18
"""Room for hundreds of jobs. Memory that was never written takes no room."""
_HEADER = struct.Struct("<QII")


class MetricsPage:
    """The memory for the metrics of this process.

    :param fd: its descriptor; None without a parent, where nobody reads metrics.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._number = 0

    def write(self, values: Any) -> None:
        """Publish values that survive JSON.

        :raises ValueError: there is no room for them.
        """
        if self._fd is None:
            return
        content = json.dumps(values).encode()
        if len(content) > HALF_BYTES - _HEADER.size:
            raise ValueError(f"{len(content)} bytes are more than {HALF_BYTES}")
        self._number += 1
        header = _HEADER.pack(self._number, len(content), zlib.crc32(content))
        os.pwrite(self._fd, header + content, self._number % 2 * HALF_BYTES)


class ChildMetrics:
    """The metrics of one child; any thread of the parent may read them.

    :ivar fd: descriptor of the memory, for the child.
    """

    def __init__(self) -> None:
        self.fd = make_memory("qdo-metrics")
        self._using = threading.Lock()
        self._last: Any = None

    def read(self) -> Any:
        """Return the latest values that the child has written, None before its first ones."""
        with self._using:
            if self.fd >= 0:
                self._last = _read(self.fd) or self._last
            return self._last

    def close(self) -> None:
        """Read for the last time, after the child has died."""
        self.read()
        with self._using:
            os.close(self.fd)
            self.fd = -1


def _read(fd: int) -> Any:
    """Return the content of the half that was written last, or else of the other one."""
    found = []
    for start in (0, HALF_BYTES):
        data = os.pread(fd, HALF_BYTES, start)
        if len(data) < _HEADER.size:
            continue
        number, length, checksum = _HEADER.unpack_from(data)
        content = data[_HEADER.size : _HEADER.size + length]
        if number and len(content) == length and zlib.crc32(content) == checksum:
            found.append((number, content))
    for _, content in sorted(found, reverse=True):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(content)
    return None
