"""Sending to SQS: by ten, and what fails on its own again.

Messages of one queue are sent in their order, one request after the other; different queues do not
wait for each other. What SQS refuses for the moment is sent again, before anything that stands
behind it. Still, within one request SQS may take a message and refuse the one before it: then
these two change places, also within a FIFO group.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qdo.brokers.aws_address import FIFO, MAX_SQS_MESSAGE, SqsAddress
from qdo.brokers.aws_errors import (
    BOTO_ERRORS,
    is_not_found,
    is_passing,
    is_throttling_code,
    translation,
)
from qdo.brokers.aws_wire import Calls
from qdo.brokers.base import DEDUP_SECONDS, NO_DEDUP, NO_DELAY, Outgoing, Terms
from qdo.brokers.s3 import MAX_S3_BODY, Objects
from qdo.brokers.side_by_side import side_by_side
from qdo.brokers.sqs_messages import Pointer, entry, pointing, size_of
from qdo.brokers.sqs_queues import SqsQueues
from qdo.describe import few
from qdo.errors import (
    AwsError,
    AwsUnreachableError,
    MessageTooLargeError,
    PartlySentError,
    QdoError,
    SqsTooLargeError,
    ThrottledError,
    UnreachableError,
    UnsupportedError,
)

log = logging.getLogger(__name__)

ACTION = "SendMessageBatch"
BATCH = 10
"""Messages of one request, at most."""
MAX_DELAY_SECONDS = 900
TRIES = 6
"""How often a message is sent before its sender is told."""
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 3.0

SEND_SECONDS = 30.0
"""After this long no further try begins."""

_UNSAID = {"Message": "its answer does not mention it"}
_POINTER_BYTES = 2048
"""More than what stands for a body in S3 takes."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A message that can be sent.

    :ivar index: its place in what the caller gave.
    :ivar made: the entry for SendMessageBatch, without its Id.
    :ivar size: bytes that count for the limit of a request.
    :ivar large: its body, where that goes to S3 first.
    """

    index: int
    made: dict[str, Any]
    size: int
    large: bytes | None = None


class Sent(NamedTuple):
    """What SQS calls a message that it took.

    :ivar sequence: its SequenceNumber, 0 on a standard queue.
    """

    id: str
    sequence: int


@dataclass(slots=True)
class _Results:
    """What came of the messages of one call."""

    sent: list[Sent | None]
    error: QdoError | None = None
    """The first reason why one was not sent."""

    def outcome(self) -> list[Sent]:
        """Return what was sent: all; raise if one was not."""
        sent = [each for each in self.sent if each is not None]
        if self.error is None:
            return sent
        if not sent:
            raise self.error
        unsent = tuple(index for index, each in enumerate(self.sent) if each is None)
        raise PartlySentError(
            done=len(sent),
            total=len(self.sent),
            rest=f"those with the numbers {few(unsent)}, counted from 0",
            reason=str(self.error),
            unsent=unsent,
            sent=tuple(self.sent),
        ) from self.error


class SqsSender:
    """Sends messages. Safe to use from several threads or greenlets.

    :param calls: makes each request once: repeating is done here.
    :param objects: where bodies go that are too large; None: they are refused.
    :param stopped: ends waiting between tries.
    """

    def __init__(
        self,
        calls: Calls,
        address: SqsAddress,
        queues: SqsQueues,
        objects: Objects | None,
        stopped: threading.Event,
    ) -> None:
        self._calls = calls
        self._address = address
        self._queues = queues
        self._objects = objects
        self._stopped = stopped

    def send(self, messages: Sequence[Outgoing]) -> list[Sent]:
        """Send messages, those of each queue in the given order.

        Nothing is sent if one of them cannot be sent at all.

        :raises PartlySentError: some were sent; it says which were not.
        """
        by_queue: dict[str, list[_Ready]] = {}
        for index, message in enumerate(messages):
            self._check(message)
            by_queue.setdefault(message.queue, []).append(self._ready(index, message))
        results = _Results([None] * len(messages))

        def send(queue: str) -> None:
            try:
                self._send_queue(queue, by_queue[queue], results.sent)
            except QdoError as error:
                results.error = results.error or error

        side_by_side(send, list(by_queue))
        return results.outcome()

    # --- what is to be sent ---

    def _check(self, message: Outgoing) -> None:
        """Raise for what SQS cannot do."""
        self._queues.full_name(message.queue)
        limit = self._address.max_body if self._objects is None else MAX_S3_BODY
        if len(message.body) > limit:
            raise self._too_large(message, limit)
        if message.terms is not None:
            _check_terms(message.queue, message.terms)

    def _too_large(self, message: Outgoing, limit: int) -> MessageTooLargeError:
        size = len(message.body)
        if self._objects is None:
            return SqsTooLargeError(
                queue=message.queue, size=size, limit=limit, most=MAX_SQS_MESSAGE
            )
        return MessageTooLargeError(queue=message.queue, size=size, limit=limit)

    def _ready(self, index: int, message: Outgoing) -> _Ready:
        terms = message.terms
        made = entry(message, message.queue.endswith(FIFO), terms.dedup_key if terms else None)
        if terms is not None and terms.due is not None:
            made["DelaySeconds"] = _delay(terms.due)
        size = size_of(made)
        if self._objects is not None and (
            len(message.body) > self._address.max_body or size > MAX_SQS_MESSAGE
        ):
            rest = size - len(made["MessageBody"].encode()) + _POINTER_BYTES
            if rest <= MAX_SQS_MESSAGE:
                return _Ready(index, made, rest, message.body)
        if size > MAX_SQS_MESSAGE:
            raise MessageTooLargeError(queue=message.queue, size=size, limit=MAX_SQS_MESSAGE)
        return _Ready(index, made, size)

    def _entry(self, queue: str, ready: _Ready) -> dict[str, Any]:
        """Return what is sent for a message, whose body is in S3 by then if it goes there."""
        made = ready.made
        if ready.large is not None and self._objects is not None:
            pointer = self._stored(queue, ready.large, self._objects)
            made = pointing(made, pointer, len(ready.large))
        return {"Id": str(ready.index), **made}

    def _stored(self, queue: str, body: bytes, objects: Objects) -> Pointer:
        """Store a body, as long as sending it would be tried; return where it is."""
        self._queues.url(queue, create=True)  # nobody would need it without its queue
        started = time.monotonic()
        for tries in range(1, TRIES):
            try:
                return objects.put(queue, body)
            except UnreachableError:
                late = time.monotonic() - started > SEND_SECONDS
                if late or self._stopped.wait(_pause(tries)):
                    raise
        return objects.put(queue, body)

    # --- sending it ---

    def _send_queue(self, queue: str, ready: Sequence[_Ready], sent: list[Sent | None]) -> None:
        for batch in _batches(ready):
            entries = [self._entry(queue, each) for each in batch]
            started = time.monotonic()
            for tries in range(1, TRIES + 1):
                entries, error = self._try(queue, entries, sent)
                if error is None:
                    break
                late = time.monotonic() - started > SEND_SECONDS
                if tries == TRIES or late or self._stopped.wait(_pause(tries)):
                    raise error

    def _try(
        self, queue: str, entries: list[dict[str, Any]], sent: list[Sent | None]
    ) -> tuple[list[dict[str, Any]], QdoError | None]:
        """Send a batch once; return what of it is to be sent again, and why.

        :raises QdoError: sending it again would not help.
        """
        name = self._queues.full_name(queue)
        url = self._queues.url(queue, create=True)
        try:
            answer = self._calls.call(ACTION, {"QueueUrl": url, "Entries": entries})
        except BOTO_ERRORS as error:
            said = translation(error, self._address.place, "queue", name)
            if is_passing(error):
                return entries, said
            if is_not_found(error):  # deleted since its address was asked for
                self._queues.forget(name)
                if self._address.create != "none":
                    return entries, said
            raise said from error
        for done in answer.get("Successful", ()):
            sequence = int(done.get("SequenceNumber") or 0)
            sent[int(done["Id"])] = Sent(done["MessageId"], sequence)
        left = [each for each in entries if sent[int(each["Id"])] is None]
        _warn_of_disorder(name, entries, left)
        failed = {each["Id"]: each for each in answer.get("Failed", ())}
        failures = [self._failure(name, failed.get(each["Id"], _UNSAID)) for each in left]
        for failure in failures:
            if not isinstance(failure, UnreachableError):
                raise failure
        return left, failures[0] if failures else None

    def _failure(self, name: str, failed: Mapping[str, Any]) -> QdoError:
        """Return the error for one message of a batch that SQS did not take."""
        code = str(failed.get("Code", "no code"))
        reason = " ".join(str(failed.get("Message") or "no reason was given").split()).rstrip(".")
        where = {"service": "SQS", "action": "sqs:SendMessage", "resource": f"queue {name!r}"}
        if is_throttling_code(code):
            return ThrottledError(**where, reason=f"{code}: {reason}")
        if failed.get("SenderFault"):
            return AwsError(**where, code=code, reason=reason)
        return AwsUnreachableError(
            service="SQS",
            region=self._address.region,
            reason=f"it did not take a message: {code}: {reason}",
            hint="",
        )


def _warn_of_disorder(
    name: str, entries: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]
) -> None:
    """Name the message groups of which SQS took a message behind one that it did not take."""
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
            "queue %s: SQS took messages of a request and not those before them, which follow now:"
            " the order is lost in message groups %s",
            name,
            few(list(overtaken)),
        )


def _check_terms(queue: str, terms: Terms) -> None:
    """Raise for what SQS cannot keep."""
    fifo = queue.endswith(FIFO)
    if terms.due is not None and fifo:
        raise _unsupported("delay single messages of a FIFO queue", NO_DELAY)
    if terms.due is not None and terms.due - time.time() > MAX_DELAY_SECONDS:
        raise _unsupported(
            f"delay a message by more than {MAX_DELAY_SECONDS} s", "send it later"
        )
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


def _delay(due: float) -> int:
    """Return whole seconds until a time, rounded up: never too early."""
    return min(max(math.ceil(due - time.time()), 0), MAX_DELAY_SECONDS)


def _batches(ready: Sequence[_Ready]) -> Iterator[list[_Ready]]:
    """Cut messages into what one request takes: ten, and 1 MiB."""
    batch: list[_Ready] = []
    size = 0
    for each in ready:
        if batch and (len(batch) == BATCH or size + each.size > MAX_SQS_MESSAGE):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.size
    if batch:
        yield batch


def _pause(tries: int) -> float:
    """Return seconds until the next try: growing, and never the same for all senders."""
    longest = min(FIRST_PAUSE_SECONDS * 2 ** (tries - 1), MAX_PAUSE_SECONDS)
    return random.uniform(longest / 2, longest)
