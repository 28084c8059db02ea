"""Receive messages of SQS: read their bodies from S3, and give each receive an id."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

import gevent

from qdo.broker_errors import ObjectTooLargeError
from qdo.brokers.aws.s3 import Objects
from qdo.brokers.base import OPEN_POLL, ReceiptHandleStore
from qdo.brokers.sqs.codec import Received
from qdo.brokers.sqs.url import FIFO
from qdo.encoding import unreadable, with_body_kind
from qdo.errors import QdoError, UnreachableError
from qdo.text import describe

# While the reader reads bodies, it hides messages again after this share of their visibility
# timeout. `qdo.brokers.sqs.in_flight` assumes that responses are not older.
READING_SHARE = 0.1
# The interval in which the reader checks, while it reads bodies, whether the claim has ended.
ENDED_SECONDS = 1.0

_log = logging.getLogger(__name__)

# A function that hides messages of a queue, by their receipts, for a number of seconds.
Hide = Callable[[str, Sequence[str], int], None]
# The maximum age of an id that a receive reuses; SQS remembers an id for 300 seconds.
KNOWN_SECONDS = 240.0


class BodyReader:
    """Reads bodies from S3. If `objects` is None, every body is in SQS."""

    def __init__(self, objects: Objects | None, visibility_seconds: int, hide: Hide) -> None:
        self._objects = objects
        self._visibility_seconds = visibility_seconds
        self._hide = hide

    def is_needed(self, messages: Sequence[Received]) -> bool:
        return any(map(self._is_in_s3, messages))

    def read(
        self,
        queue: str,
        messages: Sequence[Received],
        owed: Callable[[float], None],
        ended: Callable[[], bool],
    ) -> list[Received]:
        """Read the bodies of messages; keep the messages hidden meanwhile.

        :raises QdoError: the reader can read no body, and has released all messages.
        """
        hidden = list(messages)
        hiding = gevent.spawn(self._keep_hidden, queue, hidden, owed, ended)
        try:
            found, error = self._read_each(queue, messages, ended)
        finally:
            hiding.kill()
        if ended():
            self.release(queue, hidden, owed)
            return []
        if error is None:
            return found
        if not found:
            self.release(queue, messages, owed)
            raise error
        owed(self._visibility_seconds)
        _log.warning(
            "queue %s: the bodies of %d messages cannot be read, or they are behind such messages"
            " in their message groups; SQS delivers them again in %d s: %s",
            queue,
            len(messages) - len(found),
            self._visibility_seconds,
            describe(error),
        )
        return found

    def release(
        self, queue: str, messages: Sequence[Received], owed: Callable[[float], None]
    ) -> None:
        """Release messages; if this fails, report the time until SQS shows them again."""
        try:
            self._hide(queue, [each.receipt for each in messages], 0)
        except QdoError:
            owed(self._visibility_seconds)

    def _read_each(
        self, queue: str, messages: Sequence[Received], ended: Callable[[], bool]
    ) -> tuple[list[Received], QdoError | None]:
        """Return the messages whose bodies are readable, and the first error of the others."""
        found: list[Received] = []
        blocked_groups: set[str | None] = set()
        faults: list[QdoError] = []
        for each in messages:
            if ended():
                break
            if queue.endswith(FIFO) and each.group in blocked_groups:
                continue
            try:
                if self._is_in_s3(each):
                    _stop_if_unreachable(faults)
                found.append(self._with_body(queue, each))
            except ObjectTooLargeError as error:
                found.append(_without_body(each, error))
            except QdoError as error:
                faults.append(error)
                blocked_groups.add(each.group)
            except Exception as error:  # noqa: BLE001 - other messages must not wait
                found.append(_without_body(each, error))
        return found, faults[0] if faults else None

    def _keep_hidden(
        self,
        queue: str,
        messages: list[Received],
        owed: Callable[[float], None],
        ended: Callable[[], bool],
    ) -> None:
        """Hide messages repeatedly, until the reader kills this greenlet."""
        # Without this, another owner could receive the messages while this owner reads bodies, and
        # their jobs would end at the first extension. When the claim ends, the greenlet releases
        # the messages and clears `messages`, because the next owner must not wait for a slow body.
        pause = self._visibility_seconds * READING_SHARE
        due = time.monotonic() + pause
        while True:
            gevent.sleep(max(0.0, min(due - time.monotonic(), ENDED_SECONDS)))
            if ended():
                self.release(queue, messages, owed)
                messages.clear()
                return
            if time.monotonic() < due:
                continue
            due = time.monotonic() + pause
            try:
                self._hide(queue, [each.receipt for each in messages], self._visibility_seconds)
            except Exception as error:  # noqa: BLE001 - the loop retries
                _log.warning(
                    "queue %s: cannot extend the visibility timeout of messages whose bodies are "
                    "being read, retrying; SQS delivers them again if the timeout ends first: %s",
                    queue,
                    describe(error),
                )

    def _is_in_s3(self, message: Received) -> bool:
        pointer = message.pointer
        return pointer is not None and self._objects is not None and self._objects.is_ours(pointer)

    def _with_body(self, queue: str, message: Received) -> Received:
        # If the object is missing, the worker cannot decode the message, and applies the policy.
        pointer = message.pointer
        if pointer is None or self._objects is None or not self._objects.is_ours(pointer):
            return message
        body = self._objects.get(pointer)
        if body is None:
            _log.error(
                "queue %s: the body of a message is missing from S3; see which program or "
                "lifecycle rule deleted it: %s",
                queue,
                pointer.key,
            )
            return message._replace(body=b"", headers=unreadable("its body is missing from S3"))
        return message._replace(body=body, headers=with_body_kind(body, message.headers))


def _without_body(message: Received, error: Exception) -> Received:
    """Return a message without its unreadable body, so that the queue's policy ends it."""
    # The text of the pointer becomes the body. qdo keeps the object, which another program may own.
    return message._replace(headers=unreadable(describe(error)), pointer=None)


def _stop_if_unreachable(faults: Sequence[QdoError]) -> None:
    """Raise an error after S3 was unreachable twice, because another call can take minutes."""
    unreachable = [fault for fault in faults if isinstance(fault, UnreachableError)]
    if len(unreachable) > 1:
        raise unreachable[0]


class ReceiveAttemptId:
    """The ReceiveRequestAttemptIds of one queue."""

    # If the response of a receive is lost, SQS may still have locked message groups for the
    # receive. With the same id, SQS returns the same messages at once. With a new id, SQS returns
    # these messages only after their visibility timeout. A repeated receive must keep all its
    # parameters.

    def __init__(self) -> None:
        self._id = ""
        self._most = 0
        self._since = 0.0

    def next(self, now: float) -> str:
        """Return the id for a receive at `now`, a clock time."""
        if not self._id or now - self._since > KNOWN_SECONDS:
            self._id = str(uuid.uuid4())
            self._most = 0
            self._since = now
        return self._id

    def batch_size(self, wanted: int) -> int:
        """Return the number of messages to request; a repeated receive keeps the first number."""
        self._most = self._most or wanted
        return self._most

    @property
    def unanswered(self) -> bool:
        return bool(self._id)

    def answered(self) -> None:
        """Use a new id next, because SQS has responded, perhaps with an error."""
        self._id = ""


class OpenPoll:
    """Records the open poll of a queue with the receipts of held messages."""

    # SQS may return released messages to an open poll, even to the poll of a dead process. A
    # receive with the id of this poll then returns these messages.

    def __init__(self, queue: str, receipts: ReceiptHandleStore | None) -> None:
        self._queue = queue
        self._receipts = receipts
        self._places: list[int] = []

    def opened(self, attempt: str | None) -> None:
        """Record that a poll begins, or, for None, that the owner has stored the response."""
        self._record(() if attempt is None else (OPEN_POLL + attempt,))

    def answered(self, receipts: Iterable[str]) -> None:
        """Record the receipts of a response before the reader reads bodies."""
        # After an extension of the messages, a receive with the poll's id no longer returns them.
        self._record(receipts)

    def _record(self, entries: Iterable[str]) -> None:
        if self._receipts is not None:
            before = self._places
            self._places = [self._receipts.keep(self._queue, entry) for entry in entries]
            for place in before:
                self._receipts.drop(place)
