"""SQS in virtual time: one queue, the effects of a network on requests, and a log of deletes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from botocore import exceptions as boto
from gevent.event import AsyncResult

from tests.simulation.sqs.virtual_time import Life, Moments
from tests.support.aws.sqs_fifo import FifoQueue
from tests.support.aws.sqs_queue import Queue, SqsMessage, StandardQueue
from tests.support.aws.sqs_values import SqsError

LOOK_SECONDS = 0.25
"""How often a long poll looks."""
ENDPOINT = "http://sqs.model"
_DAYS = {"MessageRetentionPeriod": str(14 * 86_400)}


@dataclass
class RequestFaults:
    """Chances that something goes wrong with a request.

    :ivar lost: it does not arrive.
    :ivar unanswered: it is done, and its answer does not arrive.
    :ivar entry: an entry of a batch fails, and another time.
    :ivar dead: nothing answers at all.
    """

    lost: float = 0.0
    unanswered: float = 0.0
    entry: float = 0.0
    dead: bool = False


class SimulatedSqs:
    """One queue of SQS.

    :ivar deleted: called with the number of each deleted message.
    :ivar requests: by action.
    """

    def __init__(self, name: str, moments: Moments, chance: random.Random) -> None:
        self.name = name
        self.moments = moments
        self.chance = chance
        self.faults = RequestFaults()
        self.requests: Counter[str] = Counter()
        self.deleted: Callable[[int], None] = lambda number: None
        kind = FifoQueue if name.endswith(".fifo") else StandardQueue
        self.queue: Queue = kind(name, dict(_DAYS))
        self._sent = 0

    def send(self, body: Mapping[str, Any], group: str | None) -> int:
        """Send a message; return its number."""
        self._sent += 1
        number = self._sent
        fifo = self.name.endswith(".fifo")
        self.queue.add(
            SqsMessage(
                number=number,
                id=f"00000000-0000-4000-8000-{number:012d}",
                body=json.dumps({**body, "n": number}),
                attributes={},
                group=group if fifo else None,
                dedup_id=str(number) if fifo else None,
                sent=self.moments.now,
            ),
            0,
            self.moments.now,
        )
        return number

    def steal(self, share: float, only: Container[int] = range(1 << 32)) -> list[int]:
        """Invalidate receipts, as if another consumer had received their messages.

        :param share: of all that are hidden, and among them of the numbers in `only`.
        """
        stolen = []
        for message in self.queue.messages.values():
            chosen = message.hidden and message.number in only
            if chosen and self.chance.random() < share:
                message.handle = f"{self.name}/{message.number}/0/stolen"
                stolen.append(message.number)
        return stolen

    # --- the network --------------------------------------------------------------------

    def call(self, life: Life, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a connection's faults to a request of a process."""
        self.requests[action] += 1
        faults, chance, moments = self.faults, self.chance, self.moments
        moments.sleep(chance.uniform(0.001, 0.02))
        if faults.dead:
            raise boto.EndpointConnectionError(endpoint_url=ENDPOINT)
        if chance.random() < faults.lost:
            moments.sleep(chance.choice((0.01, 3.0)))
            raise boto.ConnectionClosedError(endpoint_url=ENDPOINT)
        answer: AsyncResult = AsyncResult()
        moments.spawn_in(None, self._answer, life, action, value, answer)
        answer.wait()
        moments.sleep(chance.uniform(0.001, 0.02))
        if faults.dead or chance.random() < faults.unanswered:
            raise boto.ReadTimeoutError(endpoint_url=ENDPOINT)
        if isinstance(answer.value, SqsError):
            raise boto.ClientError(
                {"Error": {"Code": answer.value.code, "Message": str(answer.value)}}, action
            )
        found: dict[str, Any] = answer.value
        return found

    def _answer(
        self, life: Life, action: str, value: Mapping[str, Any], answer: AsyncResult
    ) -> None:
        try:
            if action == "ReceiveMessage":
                answer.set(self._receive(life, value))
            elif action == "DeleteMessageBatch":
                answer.set(self._batch(value, self._delete))
            else:
                answer.set(self._batch(value, self._change))
        except SqsError as error:
            answer.set(error)

    # --- the actions --------------------------------------------------------------------

    def _receive(self, life: Life, value: Mapping[str, Any]) -> dict[str, Any]:
        until = self.moments.now + value["WaitTimeSeconds"]
        while True:
            found = self.queue.receive(
                self.moments.now,
                value["MaxNumberOfMessages"],
                value["VisibilityTimeout"],
                value.get("ReceiveRequestAttemptId"),
            )
            if found or self.moments.now >= until:
                return {"Messages": [_raw(each) for each in found]}
            self.moments.sleep(LOOK_SECONDS)
            if life.dead and self.chance.random() < 0.5:
                return {}  # the server notices the lost client late

    def _batch(
        self, value: Mapping[str, Any], do: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        done, failed = [], []
        for entry in value["Entries"]:
            try:
                trouble = self.chance.random() < self.faults.entry
                if not trouble or self.chance.random() < 0.5:
                    do(entry)
                if trouble:
                    raise SqsError("InternalError", "it happens")
            except SqsError as error:
                ours = error.code == "InternalError"
                failed.append({"Id": entry["Id"], "Code": error.code, "SenderFault": not ours})
            else:
                done.append({"Id": entry["Id"]})
        return {"Successful": done, "Failed": failed}

    def _delete(self, entry: Mapping[str, Any]) -> None:
        before = set(self.queue.messages)
        self.queue.delete(entry["ReceiptHandle"], self.moments.now)
        for number in before - set(self.queue.messages):
            self.deleted(number)

    def _change(self, entry: Mapping[str, Any]) -> None:
        self.queue.change(entry["ReceiptHandle"], entry["VisibilityTimeout"], self.moments.now)


class SimulatedCalls:
    """The connections of one process; see `qdo.brokers.aws.http.Calls`."""

    def __init__(self, server: SimulatedSqs, life: Life) -> None:
        self._server = server
        self._life = life

    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        return self._server.call(self._life, action, value)

    def close(self) -> None:
        """Nothing is kept."""


def _raw(message: SqsMessage) -> dict[str, Any]:
    """Return a message as an answer has it."""
    system = {
        "SentTimestamp": str(int(message.sent * 1000)),
        "ApproximateReceiveCount": str(message.receives),
    }
    if message.group is not None:
        system |= {"SequenceNumber": message.sequence, "MessageGroupId": message.group}
    return {
        "MessageId": message.id,
        "ReceiptHandle": message.handle,
        "Body": message.body,
        "Attributes": system,
    }
