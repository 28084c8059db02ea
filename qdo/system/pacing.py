"""Long loops that let the other greenlets of a process run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

STRIDE = 500
"""Items between two pauses: a few milliseconds for items that take 5 us each."""

_T = TypeVar("_T")


def paced(items: Iterable[_T]) -> Iterator[_T]:
    """Yield the items, and let other greenlets run after every `STRIDE` of them.

    For a loop whose length another party decides, in a process whose event loop must not stand.
    """
    for number, item in enumerate(items, 1):
        yield item
        if number % STRIDE == 0:
            time.sleep(0)  # gevent's in a worker process
