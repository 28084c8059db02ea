"""Several requests at the same time, whatever the process runs on.

The standard library's threads are greenlets once gevent has patched the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_ONCE = 8
"""Requests that are open at the same time."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def side_by_side(act: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Return what comes of each item, in order; several are worked on at the same time."""
    if len(items) < 2:
        return list(map(act, items))
    with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
        return list(pool.map(act, items))
