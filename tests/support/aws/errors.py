"""Errors in the formats of SQS, Kinesis and S3, for injected responses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tests.support.aws.clients import ACCOUNT
from tests.support.aws.http1 import HttpRequest

_REGION = re.compile(r"Credential=[^/]+/\d+/([\w-]+)/")
_JSON_KIND = {"sqs": "application/x-amz-json-1.0", "kinesis": "application/x-amz-json-1.1"}
_SERVICES = {"AmazonSQS": "sqs", "Kinesis_20131202": "kinesis"}


@dataclass(frozen=True, slots=True)
class Call:
    """The action and the target of a request.

    :ivar service: ``sqs``, ``kinesis`` or ``s3``.
    :ivar action: as the API names it; for S3, which names none, the HTTP method.
    :ivar name: of the queue or stream, "" where the request has none; for S3 the path.
    :ivar attempt: ReceiveRequestAttemptId, "" where the request has none.
    """

    service: str
    action: str
    name: str
    region: str
    attempt: str = ""

    @classmethod
    def of(cls, request: HttpRequest) -> Call:
        target, _, action = request.header("x-amz-target").partition(".")
        service = _SERVICES.get(target, "s3")
        region = _REGION.search(request.header("authorization"))
        attempt = ""
        if service == "s3":
            action, name = request.method, request.path.partition("?")[0]
        else:
            asked = json.loads(request.body or b"{}")
            name, attempt = _name(asked), str(asked.get("ReceiveRequestAttemptId", ""))
        return cls(service, action, name, region[1] if region else "us-east-1", attempt)

    @property
    def arn(self) -> str:
        """The name of the resource in policies."""
        place = f"arn:aws:{self.service}:{self.region}:{ACCOUNT}:"
        if self.service == "s3":
            return f"arn:aws:s3::{self.name.replace('/', ':', 1)}"
        return place + (f"stream/{self.name}" if self.service == "kinesis" else self.name)


def _name(asked: dict[str, object]) -> str:
    for key in ("QueueUrl", "QueueName", "StreamName", "StreamARN"):
        if key in asked:
            name = str(asked[key]).rpartition("/")[2]
            return f"{name}/{asked['ShardId']}" if "ShardId" in asked else name
    return ""


SERVICES = ("sqs", "kinesis", "s3")
_DENIED = (
    "User: arn:aws:iam::{account}:user/test is not authorized to perform: {service}:{action} on"
    " resource: {arn} because no identity-based policy allows the {service}:{action} action"
)
REFUSALS = {
    "throttle": (
        "400 RequestThrottled, 400 ProvisionedThroughputExceededException, 503 SlowDown",
        "Rate exceeded",
    ),
    "limit": (
        "400 ThrottlingException, 400 LimitExceededException, 503 SlowDown",
        "Rate exceeded",
    ),
    "error": (
        "500 InternalFailure, 500 InternalFailure, 500 InternalError",
        "We encountered an internal error. Please try again.",
    ),
    "unavailable": (
        "503 ServiceUnavailable, 503 ServiceUnavailable, 503 ServiceUnavailable",
        "The service is unavailable.",
    ),
    "expired": (
        "403 ExpiredToken, 400 ExpiredTokenException, 400 ExpiredToken",
        "The security token included in the request is expired",
    ),
    "unknown": (
        "403 InvalidClientTokenId, 400 UnrecognizedClientException, 403 InvalidAccessKeyId",
        "The security token included in the request is invalid.",
    ),
    "denied": ("403 AccessDenied, 400 AccessDeniedException, 403 AccessDenied", _DENIED),
}
"""Errors of all services: status and code of each of `SERVICES`, and the message."""


def refuse(request: HttpRequest, call: Call, fault: str) -> int:
    """Answer a request with an error in the format of its service; return the status."""
    kinds, text = REFUSALS[fault]
    number, code = kinds.split(", ")[SERVICES.index(call.service)].split()
    action, status = call.action.lower(), int(number)
    message = text.format(account=ACCOUNT, service=call.service, action=action, arn=call.arn)
    if call.service == "s3":
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>'
            f"<Message>{message}</Message></Error>"
        )
        # The response to HEAD contains no error except its status.
        request.reply(status, b"" if request.method == "HEAD" else body.encode(), "text/xml")
        return status
    body = json.dumps({"__type": f"com.amazon.coral.service#{code}", "message": message})
    fault_of = "Receiver" if status >= 500 else "Sender"
    headers = f"x-amzn-query-error: {code};{fault_of}\r\n" if call.service == "sqs" else ""
    request.reply(status, body.encode(), _JSON_KIND[call.service], headers)
    return status
