"""Brings wake-ups from any thread to the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import gevent


class Wakes:
    """Calls `wake(names)` on the event loop soon after `post(names)`, from any thread.

    :param wake: called on the hub: it must not block.
    """

    def __init__(self, wake: Callable[[set[str]], None]) -> None:
        self._wake = wake
        self._names: deque[Iterable[str]] = deque()
        self._async = gevent.get_hub().loop.async_()
        self._async.start(self._deliver)

    def post(self, names: Iterable[str]) -> None:
        """Hand over names; never blocks."""
        self._names.append(names)
        self._async.send()

    def _deliver(self) -> None:
        # One at a time: another thread may add meanwhile, and its send() calls us again.
        names: set[str] = set()
        while self._names:
            names.update(self._names.popleft())
        if names:
            self._wake(names)

    def close(self) -> None:
        """Deliver nothing more."""
        self._async.stop()
        self._async.close()
