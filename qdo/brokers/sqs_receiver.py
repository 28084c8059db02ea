"""The subscriptions of one worker process to queues of SQS."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import gevent
from gevent.event import Event

from qdo.brokers.aws_address import FIFO
from qdo.brokers.sqs_budget import Budget
from qdo.brokers.sqs_holding import Holding
from qdo.brokers.sqs_requests import Requests
from qdo.brokers.sqs_subscription import SqsSubscription
from qdo.brokers.subscription import OPEN_POLL, ReceiptBook
from qdo.coordination.lease import clock as boot_clock
from qdo.errors import QdoError

CLOSE_SECONDS = 10.0
"""How long closing waits for requests beyond the end of the last long poll."""

_log = logging.getLogger(__name__)


class SqsReceiver:
    """Makes subscriptions, and waits for what they have begun.

    :param wake: told the queues for which there is something to fetch.
    :param receipts: where to keep what is held for whoever survives this process.
    :param budget: of the bytes that are held.
    """

    def __init__(
        self,
        requests: Requests,
        wake: Callable[[Iterable[str]], None],
        *,
        visibility_seconds: float,
        idle_seconds: float,
        wait_seconds: float,
        receipts: ReceiptBook | None = None,
        budget: Budget | None = None,
        clock: Callable[[], float] = boot_clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._requests = requests
        self._wake = wake
        self._visibility_seconds = visibility_seconds
        self._idle_seconds = idle_seconds
        self._wait_seconds = wait_seconds
        self._receipts = receipts
        self._clock = clock
        self._chance = chance
        self._budget = Budget() if budget is None else budget
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
        """Return a subscription; nothing is asked before somebody fetches."""
        made = SqsSubscription(
            queue,
            self._requests,
            Holding(
                after,
                unconfirmed,
                self._visibility_seconds,
                self._clock,
                queue,
                self._receipts,
                self._budget,
            ),
            self._budget,
            idle_seconds=self._idle_seconds,
            on_lost=on_lost,
            on_news=lambda: self._wake((queue,)),
            on_closed=self._closed,
            clock=self._clock,
            chance=self._chance,
        )
        self._open[made] = None
        self._all_closed.clear()
        return made

    def give_back(self, held: Sequence[tuple[str, str]]) -> None:
        """Have messages visible again that a dead process held; takes up to `wait_seconds`.

        A long poll of the dead process may still be open at SQS, and what becomes visible
        meanwhile may go to it, to be hidden for another visibility time-out. Of a FIFO queue what
        a poll brought can be had by its id; so all is given back at once, and what went to the
        poll once more when that is over. Of a standard queue it is given back only then.

        :param held: with `OPEN_POLL` and its ReceiveRequestAttemptId where a poll was open.
        :raises QdoError: some could not be given back; the others were.
        """
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
        """Return what is to be given back of a queue once the poll of a dead process is over."""
        if queue.endswith(FIFO):
            return self._requests.receive_lost(queue, attempt)
        return receipts

    def _try(
        self, faults: list[QdoError], queue: str, receipts: Callable[[], list[str]]
    ) -> None:
        try:
            self._requests.release_receipts(queue, receipts())
        except QdoError as error:
            faults.append(error)

    def _closed(self, subscription: SqsSubscription) -> None:
        self._open.pop(subscription, None)
        if not self._open:
            self._all_closed.set()

    def close(self) -> None:
        """Close every subscription, and wait for open polls: what they bring is given back.

        Otherwise it would stay hidden until its visibility time-out.
        """
        for subscription in list(self._open):
            subscription.close()
        if not self._all_closed.wait(self._wait_seconds + CLOSE_SECONDS):
            _log.warning(
                "%d queues of SQS do not answer: what their last polls bring is seen by others"
                " after the visibility time-out",
                len(self._open),
            )
        self._requests.close()
