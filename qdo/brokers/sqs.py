"""The SQS broker: standard and FIFO queues of one region whose names begin with a prefix.

A queue of qdo is a queue of SQS, and is called what follows the prefix. This class has what
everybody needs who does not consume: finding queues, sending, counting, dead letters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from qdo.brokers.aws import make_calls, make_client
from qdo.brokers.aws_address import FIFO, MAX_SQS_MESSAGE, SqsAddress
from qdo.brokers.base import (
    DEDUP_SECONDS,
    REFERENCE,
    Backlog,
    Broker,
    Capabilities,
    DeadLetterEntry,
    DeadLetterRecord,
    Outgoing,
)
from qdo.brokers.s3 import MAX_S3_BODY, Objects
from qdo.brokers.side_by_side import AT_ONCE
from qdo.brokers.sqs_advice import advice
from qdo.brokers.sqs_facts import QueueFacts
from qdo.brokers.sqs_holding import HOLD_SECONDS
from qdo.brokers.sqs_letters import SqsLetters
from qdo.brokers.sqs_messages import TARGET
from qdo.brokers.sqs_positions import SQS_POSITIONS
from qdo.brokers.sqs_queues import SqsQueues
from qdo.brokers.sqs_sending import ACTION, SqsSender
from qdo.brokers.subscription import Reader, ReceiptBook, Subscription
from qdo.descriptors import room_for
from qdo.errors import UnsupportedError
from qdo.ordering import Order
from qdo.policy import Policy

if TYPE_CHECKING:
    from qdo.brokers.sqs_receiver import SqsReceiver

POLL_SLACK_SECONDS = 10.0
"""How much longer than a long poll its answer may take."""
CONNECTIONS = 4 * AT_ONCE
"""Requests that can be open at once, those of consuming not counted: they have their own."""
LARGER_BODIES = (
    "raise max_body of the broker's address, up to {}, or add bucket=NAME, which keeps larger"
    " bodies in S3"
)

Wake = Callable[[Iterable[str]], None]


class SqsBroker(Broker):
    """The queues below an address. Safe to use from several threads or greenlets.

    :raises CredentialsError: there are no credentials, or they cannot be used.
    :raises AwsUnreachableError: SQS does not answer.
    """

    id_node = 0
    positions = SQS_POSITIONS
    list_seconds = 60.0
    vanish_misses = 3
    polled = True
    backlog_budget = 100

    def __init__(self, address: SqsAddress) -> None:
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
        )
        self._stopped = threading.Event()
        self._wakes: list[Wake] = []
        self._receiver: SqsReceiver | None = None
        self._receipts: ReceiptBook | None = None
        self.client = make_client(address.place, connections=CONNECTIONS)
        # One that repeats nothing by itself: of a batch only what failed is sent again.
        methods = {ACTION: "send_message_batch"}
        self._sending = make_calls(address.place, TARGET, methods, connections=CONNECTIONS)
        self.objects = Objects(address.place, address.bucket) if address.bucket else None
        self.sqs_queues = SqsQueues(self.client, address)
        self._sender = SqsSender(
            self._sending, address, self.sqs_queues, self.objects, self._stopped
        )
        self._letters = SqsLetters(
            self.client, address, self.sqs_queues, self._sender, self.objects
        )
        try:
            self.sqs_queues.probe()
            if self.objects is not None:
                self.objects.check()
        except BaseException:
            self.close()
            raise

    def queues(self) -> list[str]:
        return self.sqs_queues.names()

    def order(self, queue: str) -> Order:
        return "queue" if queue.endswith(FIFO) else "none"

    def facts(self, queue: str) -> QueueFacts:
        """Return what SQS says of a queue: retention, redrive policy, and counts that may be old.

        :raises AwsNotFoundError: there is no such queue.
        """
        return self.sqs_queues.settings(queue)

    def advice(self, policies: Mapping[str, Policy]) -> list[str]:
        return advice(self.sqs_queues.settings_of(list(policies)), policies)

    # --- sending ---

    def send(self, message: Outgoing) -> str:
        return self.send_many((message,))[0]

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        """Store messages durably, those of each queue in the given order; return their ids.

        SQS cannot store all or none: where some are not stored, `PartlySentError` says which.
        """
        try:
            return [each.id for each in self._sender.send(messages)]
        finally:  # of those that were stored where others were not, too
            self._tell(m.queue for m in messages if m.terms is None or m.terms.due is None)

    def _tell(self, queues: Iterable[str]) -> None:
        if self.on_sent is not None:
            self.on_sent(set(queues))

    # --- consuming ---

    def reader(self, queue: str, after: int) -> Reader:
        raise UnsupportedError(
            broker="SQS",
            what="show messages to anybody but the owner of their queue",
            remedy="receiving them would hide them from it",
        )

    def listen(self, wake: Wake) -> Callable[[], None]:
        self._wakes.append(wake)

        def stop() -> None:
            if wake in self._wakes:
                self._wakes.remove(wake)

        return stop

    def subscribe(
        self,
        queue: str,
        after: int,
        unconfirmed: Sequence[str],
        on_lost: Callable[[int], None],
    ) -> Subscription:
        if self._receiver is None:
            self._receiver = self._made_receiver()
        return self._receiver.subscribe(queue, after, unconfirmed, on_lost)

    def keep_receipts(self, receipts: ReceiptBook) -> None:
        self._receipts = receipts

    def give_back(self, held: Sequence[tuple[str, str]]) -> None:
        if self._receiver is None:
            self._receiver = self._made_receiver()
        self._receiver.give_back(held)

    def _made_receiver(self) -> SqsReceiver:
        # Imported late: senders do without gevent.
        from qdo.brokers.sqs_receiver import SqsReceiver
        from qdo.brokers.sqs_requests import METHODS, MOST_POLLS, Requests

        address = self.address
        polls = room_for(MOST_POLLS)
        requests = Requests(
            make_calls(address.place, TARGET, METHODS, connections=CONNECTIONS),
            make_calls(
                address.place,
                TARGET,
                METHODS,
                connections=polls,
                read_seconds=address.wait_seconds + POLL_SLACK_SECONDS,
            ),
            address.place,
            self.sqs_queues.url,
            wait_seconds=address.wait_seconds,
            visibility_seconds=address.visibility_seconds,
            waiting=lambda queue: self.sqs_queues.read(queue).waiting,
            forget=lambda queue: self.sqs_queues.forget(self.sqs_queues.full_name(queue)),
            objects=self.objects,
            polls=polls,
        )
        return SqsReceiver(
            requests,
            self._wake,
            visibility_seconds=address.visibility_seconds,
            idle_seconds=address.idle_seconds,
            wait_seconds=address.wait_seconds,
            receipts=self._receipts,
        )

    def _wake(self, queues: Iterable[str]) -> None:
        for wake in list(self._wakes):
            wake(queues)

    # --- counting ---

    def backlog(self, queue: str, after: int) -> Backlog:
        """Return about how much waits in a queue: all that is not deleted, wherever `after` is."""
        counts = self.sqs_queues.counts(queue)
        return Backlog(
            count=counts.waiting + counts.in_flight,
            oldest=None,
            head=0,
            delayed=counts.delayed,
            approximate=True,
        )

    def retire(self, queue: str, last: int, older_than: float) -> int:
        """Return 0: SQS deletes what is older than the retention of the queue by itself."""
        return 0

    # --- dead letters ---

    def bury(self, letter: DeadLetterRecord) -> None:
        self._letters.bury(letter)

    def dead_letters(self, queue: str | None = None) -> list[DeadLetterRecord]:
        return [each for each in self._letters.records() if queue in (None, each.queue)]

    def dead_letter(self, queue: str, position: int) -> DeadLetterRecord | None:
        return self._letters.record(queue, position)

    def dead_letter_counts(self) -> Mapping[str, int]:
        return self._letters.counts()

    def find_dead_letters(
        self,
        queue: str | None = None,
        *,
        error: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[DeadLetterEntry]:
        return [
            entry
            for entry in self._letters.entries()
            if queue in (None, entry.queue)
            and (error is None or error.casefold() in entry.error.casefold())
            and (since is None or entry.dead_at >= since)
            and (until is None or entry.dead_at <= until)
        ]

    def retry_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[int | None]:
        """Send dead letters again, in the given order, and delete them then.

        Not one transaction: what ends in between leaves a letter that was sent again. In a FIFO
        queue such a second message is not stored for five minutes.
        """
        moved = self._letters.retry(letters)
        self._tell(queue for queue, _ in letters)
        return moved

    def discard_dead_letters(self, letters: Sequence[tuple[str, int]]) -> list[bool]:
        return self._letters.discard(letters)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._stopped.set()
        self._letters.close()
        if self.objects is not None:
            self.objects.close()
        self._sending.close()
        self.client.close()
