"""The common part of the AWS brokers: they wake listeners, and wait for senders when they close."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from qdo.broker_errors import UnusableBrokerError
from qdo.brokers.base import Broker

Wake = Callable[[Iterable[str]], None]
# The maximum time that `close` waits for open calls; longer than the timeout of a call.
CLOSE_SECONDS = 25.0


class AwsBroker(Broker):
    """A broker at AWS. Its subscriptions wake the listeners, and AWS deletes its messages."""

    id_node = 0

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._wakes: list[Wake] = []
        self._sending_now = threading.Condition()
        self._senders = 0

    @contextlib.contextmanager
    def _begun_to_send(self) -> Iterator[None]:
        """Make `close` wait for the block; raise UnusableBrokerError if the broker is closed."""
        with self._sending_now:
            if self._stopped.is_set():
                raise UnusableBrokerError(reason="this broker is closed; open a new one to send")
            self._senders += 1
        try:
            yield
        finally:
            with self._sending_now:
                self._senders -= 1
                self._sending_now.notify_all()

    def _end_sending(self) -> None:
        """Refuse further messages, and wait for the open calls of senders."""
        with self._sending_now:
            self._stopped.set()
            self._sending_now.wait_for(lambda: self._senders == 0, CLOSE_SECONDS)

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
        return 0  # AWS deletes messages after the retention of their queue or stream
