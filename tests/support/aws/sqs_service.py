"""The actions of SQS on the queues of one region, except waiting."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import Any

from tests.support.aws import sqs_values as values
from tests.support.aws.sqs_fifo import FifoQueue
from tests.support.aws.sqs_queue import MOST_SECONDS, Queue, SqsMessage
from tests.support.aws.sqs_queues import Queues
from tests.support.aws.sqs_request_log import EntryFaults
from tests.support.aws.sqs_values import SqsError, invalid, within

BATCH_BYTES = 1_048_576
_numbers = itertools.count(1)

Json = dict[str, Any]


class SqsService(Queues):
    """The queues of a region, and the actions on their messages.

    :ivar sent_to: queues whose waiting polls must be checked.
    """

    def __init__(self, region: str, faults: EntryFaults) -> None:
        super().__init__(region)
        self.sent_to: list[Queue] = []
        self._faults = faults
        self.actions: dict[str, Callable[[Json, float, str], Json]] = {
            "CreateQueue": self.create,
            "DeleteQueue": self.drop,
            "ListQueues": self.list,
            "GetQueueUrl": self.get_url,
            "GetQueueAttributes": self.get_attributes,
            "ListQueueTags": self.tags,
            "SendMessage": self.send,
            "SendMessageBatch": self.send_batch,
            "DeleteMessage": self.delete,
            "DeleteMessageBatch": self.delete_batch,
            "ChangeMessageVisibility": self.change,
            "ChangeMessageVisibilityBatch": self.change_batch,
        }

    def made(self, queue: Queue) -> None:
        queue.bury = self._bury

    def _bury(self, queue: Queue, message: SqsMessage, now: float) -> None:
        """Move messages that were received too often to their dead-letter queue."""
        target = self.queues.get(queue.dead_letter_arn.rpartition(":")[2])
        if target is None:
            return
        moved = SqsMessage(
            number=next(_numbers),
            id=message.id,
            body=message.body,
            attributes=message.attributes,
            group=message.group,
            dedup_id=message.dedup_id,
            # The retention period counts from the first send, except on FIFO queues.
            sent=now if isinstance(queue, FifoQueue) else message.sent,
            source_arn=self.arn(queue.name),
        )
        target.add(moved, 0, now)
        self.sent_to.append(target)

    def send(self, request: Json, now: float, origin: str) -> Json:
        answer = self._send(self.queue(request), request, now)
        answer.pop("Id", None)
        return answer

    def _send(self, queue: Queue, request: Json, now: float) -> Json:
        body, attributes = request.get("MessageBody", ""), request.get("MessageAttributes") or {}
        values.check_body(body)
        values.check_attributes(attributes)
        if values.size(body, attributes) > queue.number_of("MaximumMessageSize"):
            raise invalid(
                "MessageBody",
                "...",
                f"Must be shorter than {queue.attributes['MaximumMessageSize']} bytes.",
            )
        group, dedup_id, known = self._fifo(queue, request, now)
        message = known or SqsMessage(
            number=next(_numbers),
            id=str(uuid.uuid4()),
            body=body,
            attributes=attributes,
            group=group,
            dedup_id=dedup_id,
            sent=now,
        )
        if known is None:
            own = within(request, "DelaySeconds", -1, 0, 900)
            queue.add(message, queue.number_of("DelaySeconds") if own < 0 else own, now)
            self.sent_to.append(queue)
        answer = {"Id": request.get("Id"), "MessageId": message.id}
        if isinstance(queue, FifoQueue):
            answer["SequenceNumber"] = message.sequence
        return answer

    def _fifo(
        self, queue: Queue, request: Json, now: float
    ) -> tuple[str | None, str | None, SqsMessage | None]:
        """Return group, deduplication id, and the earlier message with this id."""
        group, dedup_id = request.get("MessageGroupId"), request.get("MessageDeduplicationId")
        if not isinstance(queue, FifoQueue):
            if dedup_id:
                raise invalid(
                    "MessageDeduplicationId",
                    dedup_id,
                    "The request includes a parameter that is not valid for this queue type.",
                )
            return group, None, None
        if not group:
            raise SqsError(
                "MissingParameter", "The request must contain the parameter MessageGroupId."
            )
        if request.get("DelaySeconds"):
            raise invalid(
                "DelaySeconds",
                request["DelaySeconds"],
                "The request include parameter that is not valid for this queue type.",
            )
        if not dedup_id:
            raise SqsError(
                "InvalidParameterValue",
                "The queue should either have ContentBasedDeduplication enabled or"
                " MessageDeduplicationId provided explicitly",
            )
        return group, dedup_id, queue.known(dedup_id, now)

    def send_batch(self, request: Json, now: float, origin: str) -> Json:
        total = sum(
            values.size(entry.get("MessageBody", ""), entry.get("MessageAttributes") or {})
            for entry in request.get("Entries") or ()
        )
        if total > BATCH_BYTES:
            raise SqsError(
                "BatchRequestTooLong",
                f"Batch requests cannot be longer than {BATCH_BYTES} bytes. You have sent {total}"
                " bytes.",
            )
        return self._batch("SendMessageBatch", request, now, self._send)

    def delete(self, request: Json, now: float, origin: str) -> Json:
        queue = self.queue(request)
        queue.delete(str(request.get("ReceiptHandle", "")), now)
        self.sent_to.append(queue)
        return {}

    def delete_batch(self, request: Json, now: float, origin: str) -> Json:
        def delete(queue: Queue, entry: Json, now: float) -> Json:
            queue.delete(str(entry.get("ReceiptHandle", "")), now)
            return {"Id": entry["Id"]}

        return self._batch("DeleteMessageBatch", request, now, delete)

    def change(self, request: Json, now: float, origin: str) -> Json:
        queue = self.queue(request)
        self._change(queue, request, now)
        self.sent_to.append(queue)
        return {}

    def _change(self, queue: Queue, request: Json, now: float) -> Json:
        if request.get("VisibilityTimeout") is None:
            raise SqsError(
                "MissingParameter", "The request must contain the parameter VisibilityTimeout."
            )
        seconds = within(request, "VisibilityTimeout", 0, 0, MOST_SECONDS)
        queue.change(str(request.get("ReceiptHandle", "")), seconds, now)
        return {"Id": request.get("Id")}

    def change_batch(self, request: Json, now: float, origin: str) -> Json:
        return self._batch("ChangeMessageVisibilityBatch", request, now, self._change)

    def _batch(
        self,
        action: str,
        request: Json,
        now: float,
        do: Callable[[Queue, Json, float], Json],
    ) -> Json:
        queue = self.queue(request)
        answer: Json = {"Successful": [], "Failed": []}
        for entry in map(dict, values.check_entries(request.get("Entries"))):
            if failure := self._faults.next(action, queue.name, entry["Id"]):
                answer["Failed"].append(failure)
                continue
            try:
                answer["Successful"].append(do(queue, entry, now))
            except SqsError as error:
                answer["Failed"].append(error.entry(entry["Id"]))
        self.sent_to.append(queue)
        return answer
