"""The requests to SQS about messages that one owner holds, ten messages at a time."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gevent.lock import BoundedSemaphore

from qdo.brokers.aws_address import FIFO, Place
from qdo.brokers.aws_errors import BOTO_ERRORS, translated, translation
from qdo.brokers.aws_wire import Calls
from qdo.brokers.s3 import Objects
from qdo.brokers.sqs_holding import Held
from qdo.brokers.sqs_messages import RECEIVED_ATTRIBUTES, Pointer, Received, received
from qdo.describe import describe

MOST_POLLS = 1000
"""Polls that are open at once at most; further queues wait for one to end."""
BATCH = 10
TARGET = "AmazonSQS"
METHODS = {
    "ReceiveMessage": "receive_message",
    "DeleteMessageBatch": "delete_message_batch",
    "ChangeMessageVisibilityBatch": "change_message_visibility_batch",
}
"""Of a boto3 client, by action."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of the entries of a request.

    :ivar refused: those whose receipt is no longer valid.
    :ivar failed: those to be tried again.
    """

    done: Sequence[Held]
    refused: Sequence[Held] = ()
    failed: Sequence[Held] = ()


class Requests:
    """Those of one process.

    :param calls: makes requests that are answered at once.
    :param polling: makes long polls.
    :param url_of: gives the URL of a queue; may ask SQS.
    :param objects: bodies that are too large for SQS; None where there is no place for them.
    :ivar counts: requests made, by action.
    """

    def __init__(
        self,
        calls: Calls,
        polling: Calls,
        place: Place,
        url_of: Callable[[str], str],
        *,
        wait_seconds: int,
        visibility_seconds: int,
        objects: Objects | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._calls = calls
        self._polling = polling
        self._place = place
        self._url_of = url_of
        self._wait_seconds = wait_seconds
        self._visibility_seconds = visibility_seconds
        self._objects = objects
        self._polls = BoundedSemaphore(MOST_POLLS)
        self._attempts: dict[str, str] = {}

    def close(self) -> None:
        """Let go of connections."""
        self._calls.close()
        self._polling.close()

    # --- receiving ----------------------------------------------------------------------

    def receive(
        self, queue: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> list[Received]:
        """Wait for messages, in one long poll.

        :param is_wanted: asked when it is the poll's turn: nothing is received where it is not.
        :raises QdoError: SQS cannot be asked, or a body cannot be had.
        """
        options: dict[str, Any] = {
            "QueueUrl": self._url_of(queue),
            "MaxNumberOfMessages": BATCH,
            "WaitTimeSeconds": self._wait_seconds,
            "VisibilityTimeout": self._visibility_seconds,
            "MessageSystemAttributeNames": RECEIVED_ATTRIBUTES,
            "MessageAttributeNames": ("All",),
        }
        with self._polls:
            if not is_wanted():
                return []
            if queue.endswith(FIFO):
                # A new one for each poll, but for the one after an answer that got lost: that is
                # given the same messages, whose groups would be locked for a while otherwise.
                attempt = self._attempts.setdefault(queue, str(uuid.uuid4()))
                options["ReceiveRequestAttemptId"] = attempt
            self.counts["ReceiveMessage"] += 1
            with translated(self._place, "queue", queue):
                answer = self._polling.call("ReceiveMessage", options)
            self._attempts.pop(queue, None)
        return [self._whole(queue, received(raw)) for raw in answer.get("Messages", ())]

    def _whole(self, queue: str, message: Received) -> Received:
        """Return a message with its body, wherever that is.

        Without its object a message has no body: it cannot be decoded, and its policy ends it.
        """
        pointer = message.pointer
        if pointer is None or self._objects is None or not self._objects.is_ours(pointer):
            return message
        body = self._objects.get(pointer)
        if body is None:
            _log.error("queue %s: the body of a message is gone from S3: %s", queue, pointer.key)
        return message._replace(body=body or b"")

    # --- what follows -------------------------------------------------------------------

    def delete(self, queue: str, batch: Sequence[Held]) -> Answer:
        """Delete messages, and then their bodies; raises nothing."""
        entries = [
            {"Id": str(index), "ReceiptHandle": held.receipt} for index, held in enumerate(batch)
        ]
        answer = self._ask("DeleteMessageBatch", queue, batch, entries)
        pointers = [held.pointer for held in answer.done if held.pointer is not None]
        if pointers and self._objects is not None:
            self._delete_bodies(queue, pointers, self._objects)
        return answer

    def extend(self, queue: str, batch: Sequence[Held]) -> Answer:
        """Have messages hidden for another visibility time-out; raises nothing."""
        return self._change(queue, batch, self._visibility_seconds)

    def release(self, queue: str, batch: Sequence[Held]) -> Answer:
        """Have messages visible at once; raises nothing: they will be after a while anyway."""
        return self._change(queue, batch, 0)

    def release_receipts(self, queue: str, receipts: Sequence[str]) -> None:
        """Do as `release` with receipts of others; those that are not valid are passed over."""
        for start in range(0, len(receipts), BATCH):
            entries = [
                {"Id": str(index), "ReceiptHandle": receipt, "VisibilityTimeout": 0}
                for index, receipt in enumerate(receipts[start : start + BATCH])
            ]
            with translated(self._place, "queue", queue):
                self.counts["ChangeMessageVisibilityBatch"] += 1
                self._calls.call(
                    "ChangeMessageVisibilityBatch",
                    {"QueueUrl": self._url_of(queue), "Entries": entries},
                )

    def _change(self, queue: str, batch: Sequence[Held], seconds: int) -> Answer:
        entries = [
            {"Id": str(index), "ReceiptHandle": held.receipt, "VisibilityTimeout": seconds}
            for index, held in enumerate(batch)
        ]
        return self._ask("ChangeMessageVisibilityBatch", queue, batch, entries)

    def _ask(
        self, action: str, queue: str, batch: Sequence[Held], entries: list[dict[str, Any]]
    ) -> Answer:
        try:
            url = self._url_of(queue)
            self.counts[action] += 1
            found = self._calls.call(action, {"QueueUrl": url, "Entries": entries})
        except Exception as error:  # noqa: BLE001 - tried again, and it would end a duty
            if isinstance(error, BOTO_ERRORS):
                error = translation(error, self._place, "queue", queue)
            _log.warning("queue %s: %s, tried again: %s", queue, action, describe(error))
            return Answer((), failed=batch)
        faults = {int(each["Id"]): each for each in found.get("Failed", ())}
        refused = [held for at, held in enumerate(batch) if _is_refused(faults.get(at))]
        # What is not named is not done: an answer may come from anybody between here and SQS.
        named = {int(each["Id"]) for each in found.get("Successful", ())}
        done = [held for at, held in enumerate(batch) if at in named and at not in faults]
        failed = [
            held
            for at, held in enumerate(batch)
            if at not in named and not _is_refused(faults.get(at))
        ]
        for fault in faults.values():
            _log.warning(
                "queue %s: %s of a message is refused: %s %s",
                queue,
                action,
                fault.get("Code"),
                fault.get("Message", ""),
            )
        return Answer(done, refused, failed)

    def _delete_bodies(self, queue: str, pointers: list[Pointer], objects: Objects) -> None:
        try:
            objects.delete(pointers)
        except Exception as error:  # noqa: BLE001 - their messages are done
            _log.warning(
                "queue %s: %d bodies of done messages stay in S3, the first as %s: %s",
                queue,
                len(pointers),
                pointers[0].key,
                describe(error),
            )


def _is_refused(fault: Any) -> bool:
    """Return whether the receipt of an entry is no longer valid: asking again would not help."""
    return fault is not None and bool(fault.get("SenderFault"))
