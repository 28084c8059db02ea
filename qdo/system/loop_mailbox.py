"""Runs functions of native threads on the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import gevent
from gevent._hub_local import get_hub_if_exists


def leave_gevent() -> None:
    """End the event loop of this thread, which gevent made if code on it waited through gevent."""
    hub = get_hub_if_exists()
    if hub is not None and not hub.dead:
        hub.destroy(destroy_loop=True)


class LoopMailbox:
    """Runs small functions from any thread on the event loop of the thread that created it."""

    def __init__(self) -> None:
        self._posted: deque[Callable[[], object]] = deque()
        self._async = gevent.get_hub().loop.async_()
        self._async.start(self._deliver)

    def post(self, function: Callable[[], object]) -> None:
        """Call `function` on the event loop soon; it must not block. Never blocks."""
        self._posted.append(function)
        self._async.send()

    def _deliver(self) -> None:
        # One at a time: another thread may add more, and its send() calls this again.
        while self._posted:
            self._posted.popleft()()

    def close(self) -> None:
        """Stop deliveries; no thread may post afterwards."""
        self._async.stop()
        self._async.close()
