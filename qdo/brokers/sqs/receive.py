"""Receive messages of SQS: read their bodies from S3 in time, and name each receive."""

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

# While bodies are read, messages are hidden again after this share of their visibility timeout:
# `qdo.brokers.sqs.in_flight` assumes that an answer is no older when it is stored.
READING_SHARE = 0.1
# How often the reader checks meanwhile whether the claim has ended.
ENDED_SECONDS = 1.0

_log = logging.getLogger(__name__)

# Hides messages of a queue, by their receipts, for this many seconds.
Hide = Callable[[str, Sequence[str], int], None]
# SQS knows the id of a receive for 300 seconds.
KNOWN_SECONDS = 240.0


class BodyReader:
    """Reads bodies from S3; without `objects`, every body is in SQS."""

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
        """Return messages with their bodies; hide them meanwhile.

        :raises QdoError: all are left out; they are released.
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
        """Release messages; where that fails, report when SQS shows them again."""
        try:
            self._hide(queue, [each.receipt for each in messages], 0)
        except QdoError:
            owed(self._visibility_seconds)

    def _read_each(
        self, queue: str, messages: Sequence[Received], ended: Callable[[], bool]
    ) -> tuple[list[Received], QdoError | None]:
        """Return the messages whose bodies can be read, and the first error of the others."""
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
            except Exception as error:  # noqa: BLE001 - the others must not wait for this one
                found.append(_without_body(each, error))
        return found, faults[0] if faults else None

    def _keep_hidden(
        self,
        queue: str,
        messages: list[Received],
        owed: Callable[[float], None],
        ended: Callable[[], bool],
    ) -> None:
        """Hide messages again and again until this greenlet is killed."""
        # Otherwise another owner would receive them while their bodies are read, and their jobs
        # would be lost at the first extension. Where the claim ends they are released and
        # `messages` is cleared: the next owner must not wait for a body that is still being read.
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
            except Exception as error:  # noqa: BLE001 - retried
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
        # A message whose object is missing cannot be decoded, and its policy ends it.
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
    """Return a message that its policy ends, because its body can never be read."""
    # Its body is the text of the pointer. The object stays: it belongs to another program.
    return message._replace(headers=unreadable(describe(error)), pointer=None)


def _stop_if_unreachable(faults: Sequence[QdoError]) -> None:
    """Raise if S3 was unreachable twice: one more call can take minutes, too."""
    unreachable = [fault for fault in faults if isinstance(fault, UnreachableError)]
    if len(unreachable) > 1:
        raise unreachable[0]


class ReceiveAttemptId:
    """The ReceiveRequestAttemptIds of one queue."""

    # SQS may have executed a receive without an answer, and locked message groups for it. With the
    # same id it returns the same messages again; with a new one, after their visibility timeout. A
    # repeated receive keeps all its parameters.

    def __init__(self) -> None:
        self._id = ""
        self._most = 0
        self._since = 0.0

    def next(self, now: float) -> str:
        """Return the id of the receive that is made now (clock time)."""
        if not self._id or now - self._since > KNOWN_SECONDS:
            self._id = str(uuid.uuid4())
            self._most = 0
            self._since = now
        return self._id

    def batch_size(self, wanted: int) -> int:
        """Return how many messages the receive asks for: as many as its first attempt."""
        self._most = self._most or wanted
        return self._most

    @property
    def unanswered(self) -> bool:
        return bool(self._id)

    def answered(self) -> None:
        """Use a new id next: SQS has answered, maybe with an error."""
        self._id = ""


class OpenPoll:
    """Records the open poll of a queue beside the receipts of held messages."""

    # Released messages may go to an open poll, also to that of a dead process. Its id then returns
    # these messages.

    def __init__(self, queue: str, receipts: ReceiptHandleStore | None) -> None:
        self._queue = queue
        self._receipts = receipts
        self._places: list[int] = []

    def opened(self, attempt: str | None) -> None:
        """Record that a poll begins, or that its answer is stored (None)."""
        self._record(() if attempt is None else (OPEN_POLL + attempt,))

    def answered(self, receipts: Iterable[str]) -> None:
        """Record the receipts of an answer whose bodies are still to be read."""
        # Once its messages are hidden again, the poll's id no longer returns them.
        self._record(receipts)

    def _record(self, entries: Iterable[str]) -> None:
        if self._receipts is not None:
            before = self._places
            self._places = [self._receipts.keep(self._queue, entry) for entry in entries]
            for place in before:
                self._receipts.drop(place)
