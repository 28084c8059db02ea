"""Send to SQS, ten messages at a time, and retry failed messages.

The sender sends the messages of one queue in order, one call after another. Different queues do not
wait for each other. After a temporary failure, the sender retries a message before it sends later
messages. Still, within one call SQS may store a message and reject an earlier message. Then these
two messages change places, even within a FIFO group.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qdo.backoff import Backoff
from qdo.broker_errors import SqsTooLargeError, ThrottledError
from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.aws.errors import BOTO_ERRORS, is_not_found, is_transient, translation
from qdo.brokers.aws.http import Calls
from qdo.brokers.aws.s3 import MAX_S3_BODY, Objects
from qdo.brokers.aws.sending import SendAttempts, rejection, unsent_error
from qdo.brokers.base import DEDUP_SECONDS, NO_DEDUP, NO_DELAY, Outgoing, SendOptions
from qdo.brokers.sqs.codec import entry, pointing, size_of
from qdo.brokers.sqs.queues import SqsQueues
from qdo.brokers.sqs.url import BATCH, FIFO, MAX_SQS_MESSAGE, SqsAddress
from qdo.errors import MessageTooLargeError, QdoError, UnreachableError, UnsupportedError
from qdo.system.native import run_parallel
from qdo.text import join_some

# The longest delay that SQS supports.
MAX_DELAY_SECONDS = 900
log = logging.getLogger(__name__)
ACTION = "SendMessageBatch"
SEND_BACKOFF = Backoff(0.1, 3.0)
_UNSAID = {"Message": "its answer does not mention it"}
# The maximum size in bytes of a pointer to a body in S3.
_POINTER_BYTES = 2048


def check_options(queue: str, terms: SendOptions) -> None:
    """Raise UnsupportedError for delays and deduplication that SQS does not support."""
    fifo = queue.endswith(FIFO)
    if terms.due is not None and fifo:
        raise _unsupported("delay single messages of a FIFO queue", NO_DELAY)
    if terms.due is not None and _seconds_until(terms.due) > MAX_DELAY_SECONDS:
        raise _unsupported(f"delay a message by more than {MAX_DELAY_SECONDS} s", "send it later")
    if terms.dedup_key is not None and not fifo:
        raise _unsupported(
            "deduplicate messages of a standard queue", f"{NO_DEDUP}, or to a FIFO queue"
        )
    if terms.dedup_key is not None and terms.dedup_seconds != DEDUP_SECONDS:
        raise _unsupported(
            f"deduplicate for {terms.dedup_seconds:g} s",
            f"leave dedup_seconds (--dedup-seconds) out: it is always {DEDUP_SECONDS:g} s",
        )


def _unsupported(what: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(broker="SQS", what=what, remedy=remedy)


def _seconds_until(due: float) -> float:
    return due - time.time() if due >= 0 else -due


def delay_seconds(due: float) -> int:
    """Return the seconds until a message is due, rounded up so that delivery is never early."""
    return min(max(math.ceil(_seconds_until(due)), 0), MAX_DELAY_SECONDS)


@dataclass(frozen=True, slots=True)
class _PreparedMessage:
    """A message that is ready to send."""

    # The index of the message in the caller's sequence.
    index: int
    # The entry for SendMessageBatch, without an Id.
    made: dict[str, Any]
    # The number of bytes that count toward the limit of a call.
    size: int
    # The body, if the sender must store it in S3 first.
    large: bytes | None = None


class Sent(NamedTuple):
    """The ids of a stored message; `sequence` is its SequenceNumber; 0 in a standard queue."""

    id: str
    sequence: int


class SqsSender:
    """Sends messages. Safe to use from several threads or greenlets.

    :param calls: an object that makes each call once, because the sender retries.
    :param objects: the store for bodies that are too large for SQS; None: reject such bodies.
    :param stopped: an event that ends the pauses between attempts.
    """

    def __init__(
        self,
        calls: Calls,
        address: SqsAddress,
        queues: SqsQueues,
        objects: Objects | None,
        stopped: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._address = address
        self._queues = queues
        self._objects = objects
        self._stopped = stopped
        self._clock = clock

    def send(self, messages: Sequence[Outgoing]) -> list[Sent]:
        """Send messages; keep the given order within each queue.

        :raises PartialSendError: SQS stored only some messages; the error lists the others.
        :raises QdoError: SQS stored no message, for example because a message is invalid.
        """
        by_queue: dict[str, list[_PreparedMessage]] = {}
        for index, message in enumerate(messages):
            self._check(message)
            by_queue.setdefault(message.queue, []).append(self._ready(index, message))
        sent: list[Sent | None] = [None] * len(messages)
        errors: list[QdoError] = []

        def send(queue: str) -> None:
            try:
                self._send_queue(queue, by_queue[queue], sent)
            except QdoError as error:
                errors.append(error)

        run_parallel(send, list(by_queue))
        if errors:
            raise unsent_error(sent, errors[0]) from errors[0]
        return [each for each in sent if each is not None]

    def _check(self, message: Outgoing) -> None:
        self._queues.full_name(message.queue)
        limit = self._address.max_body if self._objects is None else MAX_S3_BODY
        if len(message.body) > limit:
            raise self._too_large(message, limit)
        if message.terms is not None:
            check_options(message.queue, message.terms)

    def _too_large(self, message: Outgoing, limit: int) -> MessageTooLargeError:
        size = len(message.body)
        if self._objects is None:
            return SqsTooLargeError(
                queue=message.queue, size=size, limit=limit, most=MAX_SQS_MESSAGE
            )
        return MessageTooLargeError(queue=message.queue, size=size, limit=limit)

    def _ready(self, index: int, message: Outgoing) -> _PreparedMessage:
        terms = message.terms
        made = entry(message, message.queue.endswith(FIFO), terms.dedup_key if terms else None)
        if terms is not None and terms.due is not None:
            made["DelaySeconds"] = delay_seconds(terms.due)
        size = size_of(made)
        if self._objects is not None and (
            len(message.body) > self._address.max_body or size > MAX_SQS_MESSAGE
        ):
            rest = size - len(made["MessageBody"].encode()) + _POINTER_BYTES
            if rest <= MAX_SQS_MESSAGE:
                return _PreparedMessage(index, made, rest, message.body)
        if size > MAX_SQS_MESSAGE:
            raise MessageTooLargeError(queue=message.queue, size=size, limit=MAX_SQS_MESSAGE)
        return _PreparedMessage(index, made, size)

    def _entry(self, queue: str, ready: _PreparedMessage, attempts: SendAttempts) -> dict[str, Any]:
        """Return the entry to send for a message; store a large body in S3 first."""
        made = ready.made
        if ready.large is not None and self._objects is not None:
            pointer = self._stored(queue, ready.large, self._objects, attempts)
            made = pointing(made, pointer, len(ready.large))
        return {"Id": str(ready.index), **made}

    def _stored(
        self, queue: str, body: bytes, objects: Objects, attempts: SendAttempts
    ) -> BodyPointer:
        while True:
            try:
                self._queues.url(queue, create=True)  # a body without a queue would be useless
                pointer = objects.put(queue, body)
            except UnreachableError:
                if not attempts.wait():
                    raise
            else:
                attempts.progress()
                return pointer

    def _send_queue(
        self, queue: str, ready: Sequence[_PreparedMessage], sent: list[Sent | None]
    ) -> None:
        for batch in _batches(ready):
            attempts = SendAttempts(SEND_BACKOFF, self._stopped, self._clock)
            entries = [self._entry(queue, each, attempts) for each in batch]
            while entries:
                left, error = self._try(queue, entries, sent)
                if len(left) < len(entries):
                    attempts.progress()
                if error is not None and not attempts.wait():
                    raise error
                entries = left

    def _try(
        self, queue: str, entries: list[dict[str, Any]], sent: list[Sent | None]
    ) -> tuple[list[dict[str, Any]], QdoError | None]:
        """Send a batch once; return the messages to retry and the error; raise permanent errors."""
        name = self._queues.full_name(queue)
        try:
            url = self._queues.url(queue, create=True)
        except ThrottledError as error:
            return entries, error
        try:
            answer = self._calls.call(ACTION, {"QueueUrl": url, "Entries": entries})
        except BOTO_ERRORS as error:
            fault = translation(error, self._address.place, "queue", name)
            if is_transient(error):
                return entries, fault
            if is_not_found(error):  # the queue was deleted after the sender read its URL
                self._queues.forget(name)
                if self._address.create != "none":
                    return entries, fault
            raise fault from error
        for done in answer.get("Successful", ()):
            sequence = int(done.get("SequenceNumber") or 0)
            sent[int(done["Id"])] = Sent(done["MessageId"], sequence)
        left = [each for each in entries if sent[int(each["Id"])] is None]
        _warn_order_lost(name, entries, left)
        failed = {each["Id"]: each for each in answer.get("Failed", ())}
        failures = [
            rejection(
                self._address.place,
                "sqs:SendMessage",
                f"queue {name!r}",
                failed.get(each["Id"], _UNSAID),
            )
            for each in left
        ]
        for failure in failures:
            if not isinstance(failure, UnreachableError):
                raise failure
        return left, failures[0] if failures else None


def _warn_order_lost(
    name: str, entries: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]
) -> None:
    """Warn about message groups in which SQS rejected a message but stored a later message."""
    waiting = {each["Id"] for each in left}
    held_up: set[str] = set()
    overtaken: dict[str, None] = {}
    for each in entries:
        group = each.get("MessageGroupId")
        if group is None:
            return
        if each["Id"] in waiting:
            held_up.add(group)
        elif group in held_up:
            overtaken[group] = None
    if overtaken:
        log.warning(
            "queue %s: SQS stored messages of a call and not those before them, which are sent"
            " now: the order is lost in message groups %s",
            name,
            join_some(list(overtaken)),
        )


def _batches(ready: Sequence[_PreparedMessage]) -> Iterator[list[_PreparedMessage]]:
    """Split messages into calls of at most ten messages and 1 MiB each."""
    batch: list[_PreparedMessage] = []
    size = 0
    for each in ready:
        if batch and (len(batch) == BATCH or size + each.size > MAX_SQS_MESSAGE):
            yield batch
            batch = []
            size = 0
        batch.append(each)
        size += each.size
    if batch:
        yield batch
