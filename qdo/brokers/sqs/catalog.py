"""The queues of SQS below a prefix, as the rest of qdo sees them."""

from __future__ import annotations

from collections.abc import Mapping

from qdo.brokers.catalog import Backlog, QueueCatalog
from qdo.brokers.sqs.attributes import QueueAttributes
from qdo.brokers.sqs.config_warnings import advice
from qdo.brokers.sqs.queues import SqsQueues
from qdo.brokers.sqs.url import FIFO
from qdo.jobs.options import Order
from qdo.jobs.policy import Policy


class SqsCatalog(QueueCatalog):
    """Safe to use from several threads or greenlets."""

    list_seconds = 60.0

    def __init__(self, queues: SqsQueues) -> None:
        self._queues = queues

    def names(self) -> list[str]:
        return self._queues.names()

    def names_to_show(self) -> list[str]:
        return self._queues.names(strict=False)

    def order(self, queue: str) -> Order:
        return "queue" if queue.endswith(FIFO) else "none"

    def attributes(self, queue: str) -> QueueAttributes:
        """Return a queue's retention, redrive policy, and counts that may be old.

        :raises AwsNotFoundError: the queue does not exist.
        """
        return self._queues.settings(queue)

    def config_warnings(self, policies: Mapping[str, Policy]) -> list[str]:
        return advice(self._queues.settings_of(list(policies)), policies)

    def backlog(self, queue: str, after: int) -> Backlog:
        """Return about how much waits in a queue: all undeleted messages, whatever `after` is."""
        counts = self._queues.counts(queue)
        return Backlog(
            count=counts.waiting + counts.in_flight,
            oldest=None,
            head=0,
            delayed=counts.delayed,
            approximate=True,
            in_flight=counts.in_flight,
            retention_seconds=counts.retention_seconds,
        )
