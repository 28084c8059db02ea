"""Decode bodies of a megabyte and more.

Python's cyclic garbage collector runs repeatedly while a decoder creates containers, and visits all
containers. 64 MiB of ``[[]]`` take 11.4 s with the collector and 1.8 s without. 64 MiB of records
take 2.8 s and 0.7 s. The decoder holds Python's global lock, so another thread would not help the
event loop. Only the process of a job with executor "process" decodes in parallel.
"""

from __future__ import annotations

import gc
from typing import Any

import ujson

# Minimum bytes of a large body. Smaller bodies take at most about 20 ms.
LARGE_BYTES = 1024 * 1024


def load_large(body: bytes) -> Any:
    """Decode JSON without the garbage collector; raise ValueError for other text."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ujson.loads(body)
    finally:
        if collects:
            gc.enable()
