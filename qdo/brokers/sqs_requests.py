"""The requests to SQS about messages that one owner holds, ten messages at a time."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore

from qdo.brokers.aws_address import FIFO, Place
from qdo.brokers.aws_errors import translated
from qdo.brokers.aws_wire import Calls
from qdo.brokers.s3 import Objects
from qdo.brokers.sqs_holding import Held
from qdo.brokers.sqs_messages import (
    RECEIVED_ATTRIBUTES,
    Pointer,
    Received,
    received,
    without_body,
)
from qdo.describe import describe
from qdo.errors import AwsNotFoundError, QdoError, UnreachableError

MOST_POLLS = 1000
"""Polls that are open at once at most; further queues wait for one to end."""
BATCH = 10
READING_SHARE = 0.1
"""Messages are hidden anew after so much of their visibility time-out while bodies are read: an
answer is taken to be no older when it is taken in, see `qdo.brokers.sqs_holding`."""
ENDED_SECONDS = 1.0
"""How often it is looked meanwhile whether the claim has ended."""
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
    :param waiting: gives the number of messages of a queue that can be received, about.
    :param forget: told a queue that is gone.
    :param objects: bodies that are too large for SQS; None where there is no place for them.
    :param polls: that are open at once at most; see `qdo.descriptors`.
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
        waiting: Callable[[str], int],
        forget: Callable[[str], None] = lambda queue: None,
        objects: Objects | None = None,
        polls: int = MOST_POLLS,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._calls = calls
        self._polling = polling
        self._place = place
        self._url_of = url_of
        self._wait_seconds = wait_seconds
        self._visibility_seconds = visibility_seconds
        self._waiting = waiting
        self._forget = forget
        self._objects = objects
        self._polls = BoundedSemaphore(polls)

    def close(self) -> None:
        """Let go of connections."""
        self._calls.close()
        self._polling.close()

    # --- receiving ----------------------------------------------------------------------

    def receive(
        self,
        queue: str,
        attempt: str,
        wanted: Callable[[], int] = lambda: BATCH,
        came: Callable[[Sequence[Received]], int] = len,
        owed: Callable[[float], None] = lambda seconds: None,
        ended: Callable[[], bool] = lambda: False,
    ) -> list[Received]:
        """Wait for messages, in one long poll.

        :param attempt: a new id; that of an earlier one to have its answer, if that got lost and
            the queue is FIFO.
        :param wanted: asked when it is the poll's turn: how many messages, 10 at most; where it
            is none nothing is asked for.
        :param came: told of messages of which some have their bodies in S3, before these are
            read: returns for how many there is room; the others are given back.
        :param owed: told where some messages are left out as their bodies cannot be had, or
            cannot be given back: in how many seconds SQS shows them again. Order holds: left out
            is what is behind them in their message groups, too.
        :param ended: asked while bodies are read from S3: whether nobody wants them any more;
            then all are given back.
        :raises QdoError: SQS cannot be asked, or of all messages no body can be had.
        """
        options: dict[str, Any] = {
            "QueueUrl": self._url_of(queue),
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
                with translated(self._place, "queue", _name(options["QueueUrl"])):
                    answer = self._polling.call("ReceiveMessage", options)
            except AwsNotFoundError:
                self._forget(queue)
                raise
        messages = [received(raw) for raw in answer.get("Messages", ())]
        if any(map(self._is_elsewhere, messages)):
            most = came(messages)
            self._release(queue, messages[most:], owed)
            messages = self._read(queue, messages[:most], owed, ended)
        return messages

    def _read(
        self,
        queue: str,
        messages: Sequence[Received],
        owed: Callable[[float], None],
        ended: Callable[[], bool],
    ) -> list[Received]:
        """Return messages with their bodies; hide them meanwhile.

        What is left out stays hidden for a while, so that the next polls bring others.

        :raises QdoError: all are left out; they are shown again.
        """
        hidden = list(messages)
        hiding = gevent.spawn(self._keep_hidden, queue, hidden, owed, ended)
        try:
            found, error = self._had(queue, messages, ended)
        finally:
            hiding.kill()
        if ended():
            self._release(queue, hidden, owed)
            return []
        if error is None:
            return found
        if not found:
            self._release(queue, messages, owed)
            raise error
        owed(self._visibility_seconds)
        _log.warning(
            "queue %s: %d messages wait whose bodies cannot be had, or that are behind such in"
            " their message groups; they are received again in %d s: %s",
            queue,
            len(messages) - len(found),
            self._visibility_seconds,
            describe(error),
        )
        return found

    def _had(
        self, queue: str, messages: Sequence[Received], ended: Callable[[], bool]
    ) -> tuple[list[Received], QdoError | None]:
        """Return messages with their bodies but those that cannot be had, and why not."""
        found: list[Received] = []
        held_up: set[str | None] = set()
        faults: list[QdoError] = []
        for each in messages:
            if ended():
                break
            if queue.endswith(FIFO) and each.group in held_up:
                continue
            try:
                if self._is_elsewhere(each):
                    _stop_if_away(faults)
                found.append(self._whole(queue, each))
            except QdoError as error:
                faults.append(error)
                held_up.add(each.group)
        return found, faults[0] if faults else None

    def _keep_hidden(
        self,
        queue: str,
        messages: list[Received],
        owed: Callable[[float], None],
        ended: Callable[[], bool],
    ) -> None:
        """Have messages hidden anew until this is ended.

        Otherwise they would be received again while their bodies are read, and their jobs be lost
        as soon as it comes to extending them.

        :param messages: cleared where nobody wants them any more, and they are given back: whoever
            does would wait for a body that is still being read.
        """
        pause = self._visibility_seconds * READING_SHARE
        due = time.monotonic() + pause
        while True:
            gevent.sleep(max(0.0, min(due - time.monotonic(), ENDED_SECONDS)))
            if ended():
                self._release(queue, messages, owed)
                messages.clear()
                return
            if time.monotonic() < due:
                continue
            due = time.monotonic() + pause
            try:
                receipts = [each.receipt for each in messages]
                self._change_receipts(queue, receipts, self._visibility_seconds)
            except Exception as error:  # noqa: BLE001 - tried again
                _log.warning(
                    "queue %s: ChangeMessageVisibilityBatch, tried again: %s",
                    queue,
                    describe(error),
                )

    def _release(
        self, queue: str, messages: Sequence[Received], owed: Callable[[float], None]
    ) -> None:
        """Have messages shown again, or say when they are where that fails."""
        try:
            self.release_receipts(queue, [each.receipt for each in messages])
        except QdoError:
            owed(self._visibility_seconds)

    def _is_elsewhere(self, message: Received) -> bool:
        """Return whether the body of a message is in S3, where it may be read."""
        pointer = message.pointer
        return (
            pointer is not None and self._objects is not None and self._objects.is_ours(pointer)
        )

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
            return without_body(message)
        return message._replace(body=body)

    def look(self, queue: str) -> None:
        """Say so where messages wait although polls bring none: SQS gives no error; raises nothing.

        :param queue: its owner holds nothing of it.
        """
        try:
            count = self._waiting(queue)
        except Exception as error:  # noqa: BLE001 - nothing depends on it
            _log.debug("queue %s: its backlog is unknown: %s", queue, describe(error))
            return
        if count:
            _log.warning(
                "queue %s: about %d messages wait, and no poll brings any: somebody else has"
                " received from it and holds its message groups, or more is in flight than SQS"
                " allows",
                queue,
                count,
            )

    def receive_lost(self, queue: str, attempt: str) -> list[str]:
        """Return the receipts of what a receive of a FIFO queue brought whose answer was lost.

        Where it brought nothing SQS takes this for a new one: then they are of other messages.

        :raises QdoError: as `receive`.
        """
        options: dict[str, Any] = {
            "QueueUrl": self._url_of(queue),
            "MaxNumberOfMessages": BATCH,
            "WaitTimeSeconds": 0,
            "VisibilityTimeout": self._visibility_seconds,
            "ReceiveRequestAttemptId": attempt,
        }
        self.counts["ReceiveMessage"] += 1
        with translated(self._place, "queue", _name(options["QueueUrl"])):
            answer = self._calls.call("ReceiveMessage", options)
        return [str(raw["ReceiptHandle"]) for raw in answer.get("Messages", ())]

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
        self._change_receipts(queue, receipts, 0)

    def _change_receipts(self, queue: str, receipts: Sequence[str], seconds: int) -> None:
        for start in range(0, len(receipts), BATCH):
            entries = [
                {"Id": str(index), "ReceiptHandle": receipt, "VisibilityTimeout": seconds}
                for index, receipt in enumerate(receipts[start : start + BATCH])
            ]
            url = self._url_of(queue)
            with translated(self._place, "queue", _name(url)):
                self.counts["ChangeMessageVisibilityBatch"] += 1
                self._calls.call(
                    "ChangeMessageVisibilityBatch", {"QueueUrl": url, "Entries": entries}
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
            with translated(self._place, "queue", _name(url)):
                self.counts[action] += 1
                found = self._calls.call(action, {"QueueUrl": url, "Entries": entries})
        except Exception as error:  # noqa: BLE001 - tried again, and it would end a duty
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
        for at, fault in faults.items():
            # A done message whose delete is under way may be gone before it is extended.
            expected = batch[at].done and action != "DeleteMessageBatch"
            _log.log(
                logging.DEBUG if expected else logging.WARNING,
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


def _name(url: str) -> str:
    """Return what SQS calls a queue: with its prefix, as permissions name it."""
    return url.rsplit("/", 1)[-1]


def _stop_if_away(faults: Sequence[QdoError]) -> None:
    """Raise if S3 was out of reach twice: asking it once more can take minutes, too."""
    away = [fault for fault in faults if isinstance(fault, UnreachableError)]
    if len(away) > 1:
        raise away[0]


def _is_refused(fault: Any) -> bool:
    """Return whether the receipt of an entry is no longer valid: asking again would not help.

    Throttling is the fault of the sender to SQS, too.
    """
    if fault is None or not fault.get("SenderFault"):
        return False
    return "throttl" not in str(fault.get("Code")).lower()
