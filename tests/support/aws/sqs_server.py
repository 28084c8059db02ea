"""A fast server that speaks the protocol of SQS: ``python -m tests.support.aws.sqs_server``.

It prints its address. Control requests, all in JSON:

- ``GET /_log``: requests by action and queue, polls that wait, connections (but its own);
- ``POST /_reset_log``: forget the counts;
- ``POST /_fail_entries``: let entries of batches fail, see `EntryFault`; ``{}`` clears;
- ``POST /_advance`` with ``seconds``: advance the clock; ``{}`` sets it right again.

As with AWS, messages of a poll are in flight even if its connection is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
import uuid
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import ujson

from tests.support.aws import http1
from tests.support.aws.http1 import Connection, HttpRequest
from tests.support.aws.sqs_queue import MOST_SECONDS, Queue, SqsMessage
from tests.support.aws.sqs_request_log import EntryFaults, RequestLog
from tests.support.aws.sqs_service import SqsService
from tests.support.aws.sqs_values import SqsError, within

_REGION = re.compile(rb"Credential=[^/]+/\d+/([\w-]+)/sqs/")
_HOST = re.compile(rb"\r\nhost:[ \t]*([^\r]+)", re.IGNORECASE)
_TARGET = re.compile(rb"\r\nx-amz-target:[ \t]*AmazonSQS\.(\w+)", re.IGNORECASE)
_REST_SECONDS = 0.001
"""A timer may fire a moment before its time."""


@dataclass(slots=True, eq=False)
class _Poll:
    """A receive that waits."""

    request: HttpRequest
    limit: int
    visibility: int
    asked: dict[str, Any]
    end: asyncio.TimerHandle | None = None


class SqsServer:
    """The server: regions, waiting polls, and control requests."""

    def __init__(self, pause_seconds: float = 0.0) -> None:
        self._pause_seconds = pause_seconds
        self.connections: set[Connection] = set()
        self._peak = 0
        self._regions: dict[bytes, SqsService] = {}
        self._log = RequestLog()
        self._faults = EntryFaults()
        self._ahead = 0.0
        self._polls: defaultdict[Queue, deque[_Poll]] = defaultdict(deque)
        self._timers: dict[Queue, asyncio.TimerHandle] = {}

    def now(self) -> float:
        return time.time() + self._ahead

    # --- requests

    def handle(self, request: HttpRequest) -> None:
        """Answer a request at once, or a receive after the pause."""
        if self._pause_seconds and b"AmazonSQS.ReceiveMessage" in request.head:
            loop = asyncio.get_running_loop()
            loop.call_later(self._pause_seconds, self._handle, request)
        else:
            self._handle(request)

    def _handle(self, request: HttpRequest) -> None:
        """Answer a request, or keep it as a poll."""
        self._peak = max(self._peak, len(self.connections))
        target = _TARGET.search(request.head)
        if target is None:
            self._administer(request)
            return
        action = target[1].decode()
        name = ""
        try:
            asked = ujson.loads(request.body)
            name = str(asked.get("QueueUrl") or asked.get("QueueName") or "").rpartition("/")[2]
            count = self._log.of(action, name)
            count.requests += 1
            service = self._service(request)
            if action == "ReceiveMessage":
                self._receive(service.queue(asked), asked, request)
                return
            do = service.actions.get(action)
            if do is None:
                raise SqsError("UnsupportedOperation", f"The stub has no {action}.")
            answer = do(asked, self.now(), f"http://{_host(request)}")
            count.entries += len(answer.get("Successful", ())) or 1
            _reply(request, answer)
            self._serve_sent(service)
        except SqsError as error:
            self._log.of(action, name).errors += 1
            _refuse(request, error)

    def _service(self, request: HttpRequest) -> SqsService:
        region = _REGION.search(request.head)
        if region is None:
            raise SqsError(
                "MissingAuthenticationToken", "HttpRequest is missing Authentication Token", 403
            )
        found = self._regions.get(region[1])
        if found is None:
            found = self._regions[region[1]] = SqsService(region[1].decode(), self._faults)
        return found

    # --- receiving

    def _receive(self, queue: Queue, asked: dict[str, Any], request: HttpRequest) -> None:
        limit = within(asked, "MaxNumberOfMessages", 1, 1, 10)
        visibility = within(
            asked, "VisibilityTimeout", queue.number_of("VisibilityTimeout"), 0, MOST_SECONDS
        )
        wait = within(
            asked, "WaitTimeSeconds", queue.number_of("ReceiveMessageWaitTimeSeconds"), 0, 20
        )
        poll = _Poll(request, limit, visibility, asked)
        attempt = asked.get("ReceiveRequestAttemptId")
        found = queue.receive(self.now(), limit, visibility, attempt)
        if found or not wait:
            self._deliver(queue, poll, found)
            return
        poll.end = asyncio.get_running_loop().call_later(wait, self._give_up, queue, poll)
        self._polls[queue].append(poll)
        self._arm(queue)

    def _deliver(self, queue: Queue, poll: _Poll, found: list[SqsMessage]) -> None:
        count = self._log.of("ReceiveMessage", queue.name)
        count.entries += len(found)
        count.empty += not found
        answer = {"Messages": [_shown(message, poll.asked) for message in found]} if found else {}
        _reply(poll.request, answer)

    def _give_up(self, queue: Queue, poll: _Poll) -> None:
        self._polls[queue].remove(poll)
        self._deliver(queue, poll, [])

    def _serve_sent(self, service: SqsService) -> None:
        while service.sent_to:
            self._serve(service.sent_to.pop())

    def _serve(self, queue: Queue) -> None:
        """Answer the polls of a queue with visible messages."""
        polls = self._polls.get(queue)
        if not polls:
            return
        now = self.now()
        queue.settle(now)
        while polls and queue.has_visible():
            poll = polls[0]
            attempt = poll.asked.get("ReceiveRequestAttemptId")
            found = queue.receive(now, poll.limit, poll.visibility, attempt)
            if not found:
                break
            polls.popleft()
            if poll.end is not None:
                poll.end.cancel()
            self._deliver(queue, poll, found)
        self._arm(queue)

    def _arm(self, queue: Queue) -> None:
        """Set a timer for the next message that becomes visible."""
        timer = self._timers.pop(queue, None)
        if timer is not None:
            timer.cancel()
        due = queue.next_change()
        if due is not None and self._polls.get(queue):
            seconds = max(0.0, due - self.now()) + _REST_SECONDS
            loop = asyncio.get_running_loop()
            self._timers[queue] = loop.call_later(seconds, self._serve, queue)

    # --- control requests

    def _administer(self, request: HttpRequest) -> None:
        asked = ujson.loads(request.body) if request.body else {}
        path = request.path
        if path == "/_log":
            _reply(request, self._counts())
            return
        if path == "/_reset_log":
            self._log = RequestLog()
            self._peak = len(self.connections)
        elif path == "/_fail_entries":
            self._faults.add(asked) if asked else self._faults.clear()
        elif path == "/_advance":
            self._ahead = self._ahead + float(asked["seconds"]) if asked else 0.0
            for queue in list(self._polls):
                self._serve(queue)
        else:
            request.reply(404, b"{}")
            return
        _reply(request, {})

    def _counts(self) -> dict[str, Any]:
        waiting = Counter({queue.name: len(polls) for queue, polls in self._polls.items() if polls})
        return {
            "requests": self._log.as_json(),
            "waiting": dict(waiting),
            "connections": {"open": len(self.connections) - 1, "peak": self._peak},
        }


def _host(request: HttpRequest) -> str:
    found = _HOST.search(request.head)
    return found[1].decode().strip() if found else "127.0.0.1"


def _reply(request: HttpRequest, answer: dict[str, Any]) -> None:
    request.reply(200, ujson.dumps(answer, escape_forward_slashes=False).encode())


def _refuse(request: HttpRequest, error: SqsError) -> None:
    answer = {"__type": f"com.amazonaws.sqs#{error.code}", "message": error.message}
    fault = "Sender" if error.status < 500 else "Receiver"
    headers = (
        f"x-amzn-query-error: {error.query_code};{fault}\r\nx-amzn-RequestId: {uuid.uuid4()}\r\n"
    )
    request.reply(error.status, ujson.dumps(answer).encode(), headers=headers)


def _shown(message: SqsMessage, asked: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the attributes that a receive requests."""
    shown: dict[str, Any] = {
        "MessageId": message.id,
        "ReceiptHandle": message.handle,
        "Body": message.body,
    }
    names = asked.get("MessageSystemAttributeNames") or asked.get("AttributeNames")
    if names:
        known = _system(message)
        everything = "All" in names
        shown["Attributes"] = {
            name: value for name, value in known.items() if everything or name in names
        }
    if message.attributes and asked.get("MessageAttributeNames"):
        shown["MessageAttributes"] = message.attributes
    return shown


def _system(message: SqsMessage) -> dict[str, str]:
    known = {
        "SenderId": "AIDATESTING",
        "SentTimestamp": str(int(message.sent * 1000)),
        "ApproximateReceiveCount": str(message.receives),
        "ApproximateFirstReceiveTimestamp": str(int(message.first_received * 1000)),
    }
    if message.group:
        known["MessageGroupId"] = message.group
    if message.dedup_id:
        known["MessageDeduplicationId"] = message.dedup_id
        known["SequenceNumber"] = message.sequence
    if message.source_arn:
        known["DeadLetterQueueSourceArn"] = message.source_arn
    return known


async def run(port: int, pause_seconds: float) -> None:
    """Serve until the process is ended."""
    stub = SqsServer(pause_seconds)
    forever = await http1.serve(stub.handle, stub.connections, port)
    await forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aws.sqs_server")
    parser.add_argument("--port", type=int, default=0, help="on loopback; 0 for a free one")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each receive")
    given = parser.parse_args()
    asyncio.run(run(given.port, given.pause))


if __name__ == "__main__":
    main()
