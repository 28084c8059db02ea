"""The actions of SQS on queues themselves: made, named and dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.support.aws import sqs_values as values
from tests.support.aws.clients import ACCOUNT
from tests.support.aws.sqs_fifo import FifoQueue
from tests.support.aws.sqs_queue import MOST_SECONDS, Queue, StandardQueue
from tests.support.aws.sqs_values import SqsError, invalid, within

PAGE = 1_000
_DEFAULTS = {
    "VisibilityTimeout": "30",
    "MaximumMessageSize": "1048576",
    "MessageRetentionPeriod": "345600",
    "DelaySeconds": "0",
    "ReceiveMessageWaitTimeSeconds": "0",
}
_BOUNDS = {
    "VisibilityTimeout": (0, MOST_SECONDS),
    "MaximumMessageSize": (1_024, 1_048_576),
    "MessageRetentionPeriod": (60, 1_209_600),
    "DelaySeconds": (0, 900),
    "ReceiveMessageWaitTimeSeconds": (0, 20),
}
_OTHERS = {"RedrivePolicy", "RedriveAllowPolicy", "Policy", "SqsManagedSseEnabled"}

Json = dict[str, Any]


class Queues:
    """The queues of a region. An action takes a request and the Unix time in seconds."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.queues: dict[str, Queue] = {}

    def queue(self, request: Json) -> Queue:
        """Return the queue of a request."""
        found = self.queues.get(str(request.get("QueueUrl", "")).rpartition("/")[2])
        if found is None:
            raise values.missing_queue()
        return found

    def arn(self, name: str) -> str:
        return f"arn:aws:sqs:{self.region}:{ACCOUNT}:{name}"

    def made(self, queue: Queue) -> None:
        """Add a new queue."""

    def create(self, request: Json, now: float, origin: str) -> Json:
        """Create a queue; an existing one must have the same attributes."""
        name, given = str(request.get("QueueName", "")), dict(request.get("Attributes") or {})
        fifo = given.pop("FifoQueue", "false") == "true"
        if not re.fullmatch(r"[\w-]{1,80}|[\w-]{1,75}\.fifo", name, flags=re.ASCII):
            raise invalid(
                "QueueName",
                name,
                "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in"
                " length",
            )
        if fifo != name.endswith(".fifo"):
            raise invalid("QueueName", name, "The name of a FIFO queue ends with .fifo.")
        self._check_attributes(given, fifo)
        found = self.queues.get(name)
        if found is None:
            kind = FifoQueue if fifo else StandardQueue
            found = self.queues[name] = kind(name, {**_DEFAULTS, **given})
            found.tags.update(request.get("tags") or {})
            self.made(found)
        elif any(found.attributes.get(key) != value for key, value in given.items()):
            raise SqsError(
                "QueueNameExists", "A queue with this name exists with other attributes."
            )
        return {"QueueUrl": f"{origin}/{ACCOUNT}/{name}"}

    def _check_attributes(self, given: Mapping[str, str], fifo: bool) -> None:
        for name, value in given.items():
            if name not in {*_DEFAULTS, *_OTHERS}:
                raise SqsError("InvalidAttributeName", f"Unknown Attribute {name}.")
            low, high = _BOUNDS.get(name, (0, 0))
            if name in _BOUNDS and not (value.isdigit() and low <= int(value) <= high):
                raise SqsError("InvalidAttributeValue", f"Invalid value for the parameter {name}.")
            if name == "RedrivePolicy" and value:
                self._check_redrive(json.loads(value), fifo)

    def _check_redrive(self, policy: Json, fifo: bool) -> None:
        target = str(policy.get("deadLetterTargetArn", "")).rpartition(":")[2]
        if target not in self.queues or fifo != target.endswith(".fifo"):
            raise SqsError("InvalidParameterValue", "The dead letter target does not fit.")

    def drop(self, request: Json, now: float, origin: str) -> Json:
        del self.queues[self.queue(request).name]
        return {}

    def list(self, request: Json, now: float, origin: str) -> Json:
        """Name the queues of a prefix, in pages if a size of pages is given."""
        prefix, after = request.get("QueueNamePrefix", ""), request.get("NextToken", "")
        size = within(request, "MaxResults", 0, 1, PAGE)
        names = sorted(name for name in self.queues if name.startswith(prefix) and name > after)
        shown = names[: size or PAGE]
        answer: Json = {"QueueUrls": [f"{origin}/{ACCOUNT}/{name}" for name in shown]}
        if size and len(names) > size:
            answer["NextToken"] = shown[-1]
        return answer

    def get_url(self, request: Json, now: float, origin: str) -> Json:
        queue = self.queue({"QueueUrl": request.get("QueueName", "")})
        return {"QueueUrl": f"{origin}/{ACCOUNT}/{queue.name}"}

    def get_attributes(self, request: Json, now: float, origin: str) -> Json:
        queue = self.queue(request)
        queue.settle(now)
        hidden = queue.hidden
        found = {
            **queue.attributes,
            "QueueArn": self.arn(queue.name),
            "ApproximateNumberOfMessages": str(len(queue.messages) - sum(hidden.values())),
            "ApproximateNumberOfMessagesNotVisible": str(hidden["taken"]),
            "ApproximateNumberOfMessagesDelayed": str(hidden["delayed"]),
        }
        if isinstance(queue, FifoQueue):
            found["FifoQueue"] = "true"
        names = request.get("AttributeNames") or []
        return {
            "Attributes": {
                name: value for name, value in found.items() if "All" in names or name in names
            }
        }

    def tags(self, request: Json, now: float, origin: str) -> Json:
        return {"Tags": self.queue(request).tags}
