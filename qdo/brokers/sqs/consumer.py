"""The subscriptions of one worker process to SQS queues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import gevent
from gevent.event import Event

from qdo.brokers.base import OPEN_POLL, ReceiptHandleStore
from qdo.brokers.sqs.api import SqsApi
from qdo.brokers.sqs.in_flight import InFlightMessages, MemoryBudget
from qdo.brokers.sqs.subscription import Callbacks, SqsSubscription
from qdo.brokers.sqs.url import FIFO
from qdo.brokers.sqs.visibility import Timing
from qdo.errors import QdoError
from qdo.text import pluralize

# The time for which `close` waits for calls after the end of the last long poll.
CLOSE_SECONDS = 10.0
DEFAULT_TIMING = Timing()
_log = logging.getLogger(__name__)


class SqsConsumer:
    """Opens subscriptions; its `close` waits for their calls."""

    def __init__(
        self,
        api: SqsApi,
        wake: Callable[[Iterable[str]], None],
        *,
        visibility_seconds: float,
        idle_seconds: float,
        wait_seconds: float,
        receipts: ReceiptHandleStore | None = None,
        budget: MemoryBudget | None = None,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self.api = api
        self._wake = wake
        self._visibility_seconds = visibility_seconds
        self._idle_seconds = idle_seconds
        self._wait_seconds = wait_seconds
        self._receipts = receipts
        self._timing = timing
        self._budget = MemoryBudget() if budget is None else budget
        self._open: dict[SqsSubscription, None] = {}
        self._all_closed = Event()
        self._all_closed.set()

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> SqsSubscription:
        """Return a subscription, which begins to poll when its owner fetches."""
        made = SqsSubscription(
            queue,
            self.api,
            InFlightMessages(
                after,
                unconfirmed,
                self._visibility_seconds,
                self._timing.clock,
                queue,
                self._receipts,
                self._budget,
            ),
            self._budget,
            self._idle_seconds,
            Callbacks(on_lost, lambda: self._wake((queue,)), self._closed),
            self._timing,
        )
        self._open[made] = None
        self._all_closed.clear()
        return made

    def release(self, held: Sequence[tuple[str, str]]) -> None:
        """Release the messages that a dead process held; this takes up to `wait_seconds`.

        :param held: the queue and receipt of each message. For an open poll, the receipt is
            `OPEN_POLL` with the poll's id.
        :raises QdoError: the consumer could not release some messages, but released all others.
        """
        # A long poll of the dead process may still be open at SQS, receive released messages, and
        # hide them for another visibility timeout. For a FIFO queue, a receive with the poll's id
        # returns these messages. So the consumer releases all messages at once, and the poll's
        # messages again when the poll has ended. For a standard queue, the consumer releases all
        # messages when the poll has ended.
        queues: dict[str, list[str]] = {}
        polled: dict[str, str] = {}
        for queue, receipt in held:
            receipts = queues.setdefault(queue, [])
            if receipt.startswith(OPEN_POLL):
                polled[queue] = receipt.removeprefix(OPEN_POLL)
            else:
                receipts.append(receipt)
        faults: list[QdoError] = []
        for queue, receipts in queues.items():
            if queue not in polled or queue.endswith(FIFO):
                self._try(faults, queue, partial(list, receipts))
        if polled:
            gevent.sleep(self._wait_seconds)
        for queue, attempt in polled.items():
            self._try(faults, queue, partial(self._left, queue, attempt, queues[queue]))
        if faults:
            raise faults[0]

    def _left(self, queue: str, attempt: str, receipts: list[str]) -> list[str]:
        """Return the receipts to release after the poll of a dead process has ended."""
        if queue.endswith(FIFO):
            return self.api.receive_lost(queue, attempt)
        return receipts

    def _try(self, faults: list[QdoError], queue: str, receipts: Callable[[], list[str]]) -> None:
        try:
            self.api.release_receipts(queue, receipts())
        except QdoError as error:
            faults.append(error)

    def _closed(self, subscription: SqsSubscription) -> None:
        self._open.pop(subscription, None)
        if not self._open:
            self._all_closed.set()

    def close(self) -> None:
        """Close every subscription; wait for open polls to release their messages."""
        # Without this wait, the messages would stay hidden until their visibility timeout.
        for subscription in list(self._open):
            subscription.close()
        if not self._all_closed.wait(self._wait_seconds + CLOSE_SECONDS):
            _log.warning(
                "SQS does not answer for %s: other workers receive the messages of the last polls"
                " after the visibility timeout",
                pluralize(len(self._open), "queue"),
            )
        self.api.close()
