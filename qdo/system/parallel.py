"""Runs several requests at the same time, with or without gevent.

The standard library's threads are greenlets once gevent has patched the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_ONCE = 8
"""Maximum requests at the same time."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def run_parallel(act: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Call `act` for each item, several at a time; return the results in order."""
    if len(items) < 2:
        return list(map(act, items))
    with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
        return list(pool.map(act, items))
