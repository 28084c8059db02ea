"""The calls to SQS about the messages of one owner, with up to ten messages per call."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gevent.lock import BoundedSemaphore

from qdo.broker_errors import AwsNotFoundError
from qdo.brokers.aws.address import BodyPointer, ServiceAddress
from qdo.brokers.aws.errors import translate
from qdo.brokers.aws.http import Calls
from qdo.brokers.aws.s3 import Objects
from qdo.brokers.sqs.codec import RECEIVED_ATTRIBUTES, Received, decode_received
from qdo.brokers.sqs.in_flight import InFlightMessage
from qdo.brokers.sqs.queues import SqsQueues
from qdo.brokers.sqs.receive import BodyReader
from qdo.brokers.sqs.url import BATCH, FIFO
from qdo.text import describe, pluralize

# The maximum number of open polls; the polls of further queues wait.
MOST_POLLS = 1000
# The maximum length of SQS's reasons in the log, in characters.
MOST_REASON = 200
# The names of a boto3 client's methods by action.
METHODS = {
    "ReceiveMessage": "receive_message",
    "DeleteMessageBatch": "delete_message_batch",
    "ChangeMessageVisibilityBatch": "change_message_visibility_batch",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiveResponse:
    """The entries of a call by result."""

    done: Sequence[InFlightMessage]
    # The entries with receipts that are no longer valid.
    refused: Sequence[InFlightMessage] = ()
    # The entries to retry.
    failed: Sequence[InFlightMessage] = ()


class SqsApi:
    """The calls of one process.

    :param calls: an object that makes all calls except long polls.
    :param polling: an object that makes long polls.
    :param objects: the objects in S3; None: every body is in SQS.
    :param polls: the maximum number of open polls; see `qdo.system.processes`.
    :ivar counts: the number of calls by action.
    """

    def __init__(
        self,
        calls: Calls,
        polling: Calls,
        place: ServiceAddress,
        queues: SqsQueues,
        *,
        wait_seconds: int,
        visibility_seconds: int,
        objects: Objects | None = None,
        polls: int = MOST_POLLS,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._calls = calls
        self._polling = polling
        self._place = place
        self._queues = queues
        self._wait_seconds = wait_seconds
        self._visibility_seconds = visibility_seconds
        self._objects = objects
        self._bodies = BodyReader(objects, visibility_seconds, self._change_receipts)
        self._polls = BoundedSemaphore(polls)

    def close(self) -> None:
        self._calls.close()
        self._polling.close()

    def receive(
        self,
        queue: str,
        attempt: str,
        wanted: Callable[[], int] = lambda: BATCH,
        came: Callable[[Sequence[Received]], int] = len,
        owed: Callable[[float], None] = lambda seconds: None,
        ended: Callable[[], bool] = lambda: False,
    ) -> list[Received]:
        """Wait for messages with one long poll.

        :param attempt: a new id. If the response of a receive from a FIFO queue is lost, a receive
            with the same id returns the same messages again.
        :param wanted: a function, called just before the poll, that returns the number of messages
            to receive, at most 10.
        :param came: a function of the received messages, called before the method reads bodies from
            S3. The result is the number of messages to keep; the method releases the others.
        :param owed: a function that the method calls with the seconds after which SQS shows omitted
            messages again. To keep the order, the method also omits later messages of the same
            groups.
        :param ended: a function that returns whether the claim has ended. At the end of the claim,
            the method releases all messages.
        :raises QdoError: the poll failed, or the method could not read any body.
        """
        options: dict[str, Any] = {
            "QueueUrl": self._queues.url(queue),
            "WaitTimeSeconds": self._wait_seconds,
            "VisibilityTimeout": self._visibility_seconds,
            "MessageSystemAttributeNames": RECEIVED_ATTRIBUTES,
            "MessageAttributeNames": ("All",),
        }
        if queue.endswith(FIFO):
            options["ReceiveRequestAttemptId"] = attempt
        with self._polls:
            options["MaxNumberOfMessages"] = most = wanted()
            if not most:
                return []
            self.counts["ReceiveMessage"] += 1
            try:
                with translate(self._place, "queue", _name(options["QueueUrl"])):
                    answer = self._polling.call("ReceiveMessage", options)
            except AwsNotFoundError:
                self._queues.forget_queue(queue)
                raise
        messages = [decode_received(raw) for raw in answer.get("Messages", ())]
        if self._bodies.is_needed(messages):
            most = came(messages)
            self._bodies.release(queue, messages[most:], owed)
            messages = self._bodies.read(queue, messages[:most], owed, ended)
        return messages

    def look(self, queue: str) -> None:
        """Warn if messages wait although the owner holds no messages; raise no error."""
        # SQS reports no error if a poll wrongly returns no messages.
        try:
            count = self._queues.waiting(queue)
        except Exception as error:  # noqa: BLE001 - the look is optional
            _log.debug("queue %s: its backlog is unknown: %s", queue, describe(error))
            return
        if count:
            _log.warning(
                "queue %s: about %d messages wait, and no poll brings any: another consumer has"
                " received from it and holds its message groups, or more messages are in flight"
                " than SQS allows",
                queue,
                count,
            )

    def receive_lost(self, queue: str, attempt: str) -> list[str]:
        """Repeat a receive from a FIFO queue after its response was lost; return the receipts."""
        # If the lost response was empty, SQS treats this call as new, and returns other messages.
        options: dict[str, Any] = {
            "QueueUrl": self._queues.url(queue),
            "MaxNumberOfMessages": BATCH,
            "WaitTimeSeconds": 0,
            "VisibilityTimeout": self._visibility_seconds,
            "ReceiveRequestAttemptId": attempt,
        }
        self.counts["ReceiveMessage"] += 1
        with translate(self._place, "queue", _name(options["QueueUrl"])):
            answer = self._calls.call("ReceiveMessage", options)
        return [str(raw["ReceiptHandle"]) for raw in answer.get("Messages", ())]

    def delete(self, queue: str, batch: Sequence[InFlightMessage]) -> ReceiveResponse:
        """Delete messages, and then their bodies; raise no error."""
        entries = [
            {"Id": str(index), "ReceiptHandle": held.receipt} for index, held in enumerate(batch)
        ]
        answer = self._ask("DeleteMessageBatch", queue, batch, entries)
        pointers = [held.pointer for held in answer.done if held.pointer is not None]
        if pointers and self._objects is not None:
            self._delete_bodies(queue, pointers, self._objects)
        return answer

    def extend(self, queue: str, batch: Sequence[InFlightMessage]) -> ReceiveResponse:
        """Hide messages for another visibility timeout; raise no error."""
        return self._change(queue, batch, self._visibility_seconds)

    def release(self, queue: str, batch: Sequence[InFlightMessage]) -> ReceiveResponse:
        """Make messages visible at once; raise no error, because they appear after a timeout."""
        return self._change(queue, batch, 0)

    def release_receipts(self, queue: str, receipts: Sequence[str]) -> None:
        """Release messages by the receipts of other processes; skip invalid receipts."""
        self._change_receipts(queue, receipts, 0)

    def _change_receipts(self, queue: str, receipts: Sequence[str], seconds: int) -> None:
        for start in range(0, len(receipts), BATCH):
            entries = [
                {"Id": str(index), "ReceiptHandle": receipt, "VisibilityTimeout": seconds}
                for index, receipt in enumerate(receipts[start : start + BATCH])
            ]
            url = self._queues.url(queue)
            with translate(self._place, "queue", _name(url)):
                self.counts["ChangeMessageVisibilityBatch"] += 1
                self._calls.call(
                    "ChangeMessageVisibilityBatch", {"QueueUrl": url, "Entries": entries}
                )

    def _change(
        self, queue: str, batch: Sequence[InFlightMessage], seconds: int
    ) -> ReceiveResponse:
        entries = [
            {"Id": str(index), "ReceiptHandle": held.receipt, "VisibilityTimeout": seconds}
            for index, held in enumerate(batch)
        ]
        return self._ask("ChangeMessageVisibilityBatch", queue, batch, entries)

    def _ask(
        self,
        action: str,
        queue: str,
        batch: Sequence[InFlightMessage],
        entries: list[dict[str, Any]],
    ) -> ReceiveResponse:
        try:
            url = self._queues.url(queue)
            with translate(self._place, "queue", _name(url)):
                self.counts[action] += 1
                found = self._calls.call(action, {"QueueUrl": url, "Entries": entries})
        except Exception as error:  # noqa: BLE001 - the owner retries; an error must not end a duty
            _log.warning("queue %s: %s failed, retrying: %s", queue, action, describe(error))
            return ReceiveResponse((), failed=batch)
        faults = {int(each["Id"]): each for each in found.get("Failed", ())}
        refused = [held for at, held in enumerate(batch) if _is_refused(faults.get(at))]
        # Entries missing from the response are not done, because a proxy may have sent the
        # response.
        named = {int(each["Id"]) for each in found.get("Successful", ())}
        done = [held for at, held in enumerate(batch) if at in named and at not in faults]
        failed = [
            held
            for at, held in enumerate(batch)
            if at not in named and not _is_refused(faults.get(at))
        ]
        _log_rejected(queue, action, batch, faults)
        return ReceiveResponse(done, refused, failed)

    def _delete_bodies(self, queue: str, pointers: list[BodyPointer], objects: Objects) -> None:
        try:
            objects.delete(pointers)
        except Exception as error:  # noqa: BLE001 - their messages are done
            _log.warning(
                "queue %s: %d bodies of deleted messages stay in S3, the first as %s; delete "
                "them, or let a lifecycle rule expire them: %s",
                queue,
                len(pointers),
                pointers[0].key,
                describe(error),
            )


def _log_rejected(
    queue: str, action: str, batch: Sequence[InFlightMessage], faults: Mapping[int, Any]
) -> None:
    """Log the rejected entries of a call: one line for each reason, with the number of messages."""
    # Shorten SQS's error texts, because they contain receipt handles of hundreds of characters.
    reasons: Counter[tuple[int, str, str]] = Counter()
    for at, fault in faults.items():
        # SQS may have deleted a done message before its extension.
        expected = batch[at].done and action != "DeleteMessageBatch"
        level = logging.DEBUG if expected else logging.WARNING
        reason = str(fault.get("Message") or "").replace(batch[at].receipt, "...")
        reasons[level, str(fault.get("Code")), reason[:MOST_REASON]] += 1
    for (level, code, reason), count in reasons.items():
        messages = pluralize(count, "message")
        _log.log(
            level, "queue %s: SQS rejected %s of %s: %s %s", queue, action, messages, code, reason
        )


def _name(url: str) -> str:
    """Return the full SQS name of a queue, which permissions contain."""
    return url.rsplit("/", 1)[-1]


def _is_refused(fault: Any) -> bool:
    """Return whether the receipt of an entry is invalid, so that a retry cannot help."""
    # SQS also reports throttling as a sender's fault.
    if fault is None or not fault.get("SenderFault"):
        return False
    return "throttl" not in str(fault.get("Code")).lower()
