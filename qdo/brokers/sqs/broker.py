"""The SQS broker: standard and FIFO queues in one region whose names begin with a prefix.

Each qdo queue is an SQS queue; its qdo name is the part after the prefix. Senders and operators
need only the class `SqsBroker`. A worker makes an `SqsConsumer` when it subscribes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from qdo.brokers.aws.broker import AwsBroker
from qdo.brokers.aws.clients import make_calls, make_client
from qdo.brokers.aws.s3 import MAX_S3_BODY, Objects
from qdo.brokers.base import (
    DEDUP_SECONDS,
    REFERENCE,
    Capabilities,
    Outgoing,
    Reader,
    ReceiptHandleStore,
    Subscription,
)
from qdo.brokers.catalog import Backlog, QueueCatalog
from qdo.brokers.sqs.codec import SQS_POSITIONS, TARGET
from qdo.brokers.sqs.dead_letters import SqsDeadLetters
from qdo.brokers.sqs.queues import QueueAttributes, Redrive, SqsQueues
from qdo.brokers.sqs.sender import ACTION, SqsSender
from qdo.brokers.sqs.url import FIFO, HOLD_SECONDS, MAX_SQS_MESSAGE, SqsAddress
from qdo.errors import UnsupportedError
from qdo.jobs.options import Order
from qdo.jobs.retry import PolicyInForce
from qdo.system.native import AT_ONCE
from qdo.system.processes import ensure_open_files
from qdo.text import join_some

if TYPE_CHECKING:
    from qdo.brokers.sqs.consumer import SqsConsumer


# The number of receives that a redrive policy should allow for each attempt of a job. After
# handovers and crashes, owners receive messages again even if the jobs never ran.
RECEIVES_PER_ATTEMPT = 10
LONGEST_RETENTION_SECONDS = 14 * 86_400
# The extra time that a response may take after the end of its long poll.
POLL_SLACK_SECONDS = 10.0
# The maximum number of open calls. Calls of consumers have separate connections.
CONNECTIONS = 4 * AT_ONCE
LARGER_BODIES = (
    "raise max_body of the broker's address, up to {}, or add bucket=NAME, which keeps larger"
    " bodies in S3"
)


def advice(
    facts: Mapping[str, QueueAttributes], policies: Mapping[str, PolicyInForce]
) -> list[str]:
    return [*_on_redrive(facts, policies), *_on_retention(facts, policies)]


def _on_redrive(
    facts: Mapping[str, QueueAttributes], policies: Mapping[str, PolicyInForce]
) -> Iterable[str]:
    """Yield a warning for each target to which SQS would move messages too early."""
    low: dict[Redrive, list[str]] = {}
    for queue, each in facts.items():
        needed = RECEIVES_PER_ATTEMPT * _attempts(policies[queue])
        if each.redrive is not None and each.redrive.max_receives < needed:
            low.setdefault(each.redrive, []).append(queue)
    for redrive, queues in low.items():
        needed = RECEIVES_PER_ATTEMPT * max(_attempts(policies[queue]) for queue in queues)
        order = ", which breaks the order of their groups" if _any_fifo(queues) else ""
        yield (
            f"SQS itself moves messages of {join_some(queues)} to {redrive.target} after "
            f"{redrive.max_receives} receives, without their error and maybe without ever having "
            f"been tried{order}: raise maxReceiveCount to {needed}, or remove the redrive policy"
        )


def _on_retention(
    facts: Mapping[str, QueueAttributes], policies: Mapping[str, PolicyInForce]
) -> Iterable[str]:
    short: dict[int, list[str]] = {}
    for queue, each in facts.items():
        if each.retention_seconds < LONGEST_RETENTION_SECONDS and policies[queue].blocks:
            short.setdefault(each.retention_seconds, []).append(queue)
    for seconds, queues in short.items():
        yield (
            f"a failing message may block {join_some(queues)}, and SQS deletes what waits there "
            f"after {seconds / 86_400:g} days: raise MessageRetentionPeriod to "
            f"{LONGEST_RETENTION_SECONDS}, 14 days"
        )


def _attempts(policy: PolicyInForce) -> int:
    """Return the maximum number of attempts of a message, for any error."""
    return max([policy.attempts, *(rule.attempts or 0 for rule in policy.rules)])


def _any_fifo(queues: Iterable[str]) -> bool:
    return any(queue.endswith(FIFO) for queue in queues)


class SqsCatalog(QueueCatalog):
    """The queues below an address. Safe to use from several threads or greenlets."""

    list_seconds = 60.0

    def __init__(self, queues: SqsQueues) -> None:
        self._queues = queues

    def names(self) -> list[str]:
        return self._queues.names()

    def names_to_show(self) -> list[str]:
        return self._queues.names(strict=False)

    def order(self, queue: str) -> Order:
        return "queue" if queue.endswith(FIFO) else "none"

    def config_warnings(self, policies: Mapping[str, PolicyInForce]) -> list[str]:
        return advice(self._queues.settings_of(list(policies)), policies)

    def backlog(self, queue: str, after: int) -> Backlog:
        """Return the approximate backlog of a queue: all undeleted messages, for any `after`."""
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


class SqsBroker(AwsBroker):
    """The queues below an address. Safe to use from several threads or greenlets."""

    positions = SQS_POSITIONS
    catalog: SqsCatalog
    dead_letters: SqsDeadLetters

    def __init__(self, address: SqsAddress) -> None:
        super().__init__()
        self.address = address
        self.capabilities = Capabilities(
            ordered=True,
            seekable=False,
            countable=True,
            delay=True,
            peek=False,
            max_body_bytes=MAX_S3_BODY if address.bucket else address.max_body,
            dedup=True,
            dedup_seconds=DEDUP_SECONDS,
            hold_seconds=HOLD_SECONDS,
            larger_bodies=REFERENCE if address.bucket else LARGER_BODIES.format(MAX_SQS_MESSAGE),
            subscriptions=True,
            doorbell=True,
            mixed_order=True,
            checks_config=True,
            missing_lists_before_retire=3,
            backlog_budget=100,
        )
        self._consumer: SqsConsumer | None = None
        self._receipts: ReceiptHandleStore | None = None
        self.client = make_client(address.place, connections=CONNECTIONS)
        # Do not retry in the client, because the sender retries only the failed messages of a
        # batch.
        methods = {ACTION: "send_message_batch"}
        self._sending = make_calls(address.place, TARGET, methods, connections=CONNECTIONS)
        self.objects = Objects(address.place, address.bucket) if address.bucket else None
        self.sqs_queues = SqsQueues(self.client, address)
        self._sender = SqsSender(
            self._sending, address, self.sqs_queues, self.objects, self._stopped
        )
        self.catalog = SqsCatalog(self.sqs_queues)
        self.dead_letters = SqsDeadLetters(
            self.client, address, self.sqs_queues, self._sender, self.objects, self._notify
        )
        try:
            self.sqs_queues.probe()
            if self.objects is not None:
                self.objects.check()
        except BaseException:
            # Also after Ctrl-C during a probe: the caller does not get the broker and cannot close
            # it.
            self.close()
            raise

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store the messages of each queue in the given order; return their ids."""
        # SQS may store only some messages. Then a PartialSendError lists the unsent messages.
        with self._begun_to_send():
            try:
                return [each.id for each in self._sender.send(messages)]
            finally:  # if some messages failed, owners still need to know about the others
                self._notify(m.queue for m in messages if m.terms is None or m.terms.due is None)

    def _notify(self, queues: Iterable[str]) -> None:
        if self.on_sent is not None:
            self.on_sent(set(queues))

    def reader(self, queue: str, after: int) -> Reader:
        raise UnsupportedError(
            broker="SQS",
            what="show messages to anyone but the owner of their queue",
            remedy="receiving them would hide them from it",
        )

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        return self._opened_consumer().subscribe(queue, after, unconfirmed, on_lost)

    def attach_receipt_store(self, receipts: ReceiptHandleStore) -> None:
        self._receipts = receipts

    def release(self, held: Sequence[tuple[str, str]]) -> None:
        self._opened_consumer().release(held)

    def _opened_consumer(self) -> SqsConsumer:
        self._consumer = self._consumer or self._make_consumer()
        return self._consumer

    def _make_consumer(self) -> SqsConsumer:
        # Import late, because senders do not need gevent.
        from qdo.brokers.sqs.api import METHODS, MOST_POLLS, SqsApi
        from qdo.brokers.sqs.consumer import SqsConsumer

        address = self.address
        polls = ensure_open_files(MOST_POLLS)
        api = SqsApi(
            make_calls(address.place, TARGET, METHODS, connections=CONNECTIONS),
            make_calls(
                address.place,
                TARGET,
                METHODS,
                connections=polls,
                read_seconds=address.wait_seconds + POLL_SLACK_SECONDS,
            ),
            address.place,
            self.sqs_queues,
            wait_seconds=address.wait_seconds,
            visibility_seconds=address.visibility_seconds,
            objects=self.objects,
            polls=polls,
        )
        return SqsConsumer(
            api,
            self._wake,
            visibility_seconds=address.visibility_seconds,
            idle_seconds=address.idle_seconds,
            wait_seconds=address.wait_seconds,
            receipts=self._receipts,
        )

    def call_counts(self) -> dict[str, int]:
        return {} if self._consumer is None else dict(self._consumer.api.counts)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self._end_sending()
        self.dead_letters.close()
        if self.objects is not None:
            self.objects.close()
        self._sending.close()
        self.client.close()
