"""The common part of the brokers at AWS: they wake their listeners themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from qdo.brokers.base import Broker

Wake = Callable[[Iterable[str]], None]


class AwsBroker(Broker):
    """A broker whose subscriptions wake the listeners, and whose messages AWS deletes."""

    id_node = 0

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._wakes: list[Wake] = []

    def listen(self, wake: Wake) -> Callable[[], None]:
        self._wakes.append(wake)

        def stop() -> None:
            if wake in self._wakes:
                self._wakes.remove(wake)

        return stop

    def _wake(self, queues: Iterable[str]) -> None:
        for wake in list(self._wakes):
            wake(queues)

    def trim(self, queue: str, last: int, older_than: float) -> int:
        """Return 0: AWS deletes messages after the retention of their queue or stream."""
        return 0
