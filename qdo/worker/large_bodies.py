"""Decodes bodies of a megabyte and more.

Python's cyclic garbage collector runs again and again while a decoder creates containers, and
visits all of them: 64 MiB of ``[[]]`` take 11.4 s with it and 1.8 s without, 64 MiB of records
2.8 and 0.7 s. The decoder holds Python's global lock, so another thread would not help the event
loop: only the process of a job with executor "process" decodes beside it.
"""

from __future__ import annotations

import gc
from typing import Any

import ujson

# The size of a large body. Smaller ones take at most some 20 ms.
LARGE_BYTES = 1024 * 1024


def load_large(body: bytes) -> Any:
    """Return the value of JSON, without the garbage collector; raise ValueError for others."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ujson.loads(body)
    finally:
        if collects:
            gc.enable()
