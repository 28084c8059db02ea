"""The doorbells that a registered worker watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from qdo.coordination.protocol.doorbells import DoorbellWatches


class Doorbells:
    """The doorbells of queues whose owner is idle; does nothing without a callback."""

    def __init__(
        self, watches: DoorbellWatches | None, put: Callable[[Callable[[], object]], None]
    ) -> None:
        self._watches = watches
        self._put = put

    def watch(self, queues: Sequence[str]) -> None:
        """Report the next notification of each of these queues."""
        if self._watches is not None:
            self._put(partial(self._watches.watch, queues))

    def unwatch(self, queues: Sequence[str]) -> None:
        """Stop watching the doorbells of these queues, and forget them."""
        if self._watches is not None:
            self._put(partial(self._watches.unwatch, queues))
