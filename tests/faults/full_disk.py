"""A file system without room."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MARGIN = 1 << 20
"""Bytes that are written instead of reserved, because the file needs blocks of its own."""


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill a file system to its last byte during the block."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):  # it is fast where it can be done
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(folder).free - MARGIN))
        file.seek(0, os.SEEK_END)
        for size in (65536, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    try:
        yield
    finally:
        filler.unlink()
