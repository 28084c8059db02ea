"""Reads the entries that a dead process left in shared memory, whatever its jobs wrote there."""

from __future__ import annotations

import os
from collections.abc import Iterator

ENTRY_BYTES = 1024
"""Fits the longest names: 200 characters of at most 4 bytes, and the name of a worker."""
_CHUNK_BYTES = ENTRY_BYTES << 10


def read_entries(fd: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and contents of the entries; parts of the memory without any are omitted.

    Any code of the dead process may have changed the size of the memory. So it is not mapped: a
    mapping of memory that shrinks would kill this process.

    :param most: number of entries after which the rest is ignored.
    """
    for at in range(0, min(os.fstat(fd).st_size, most * ENTRY_BYTES), _CHUNK_BYTES):
        chunk = os.pread(fd, _CHUNK_BYTES, at)
        if chunk.count(0) < len(chunk):
            for start in range(0, len(chunk) - ENTRY_BYTES + 1, ENTRY_BYTES):
                yield (at + start) // ENTRY_BYTES, chunk[start : start + ENTRY_BYTES]


def text(data: bytes) -> str:
    """Return a name of an entry."""
    return data.decode(errors="replace")
