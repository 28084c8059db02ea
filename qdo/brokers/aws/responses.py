"""Responses of AWS services, checked before they are trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ujson
from botocore import exceptions as boto

_REQUEST_ID = "x-amzn-RequestId"
"""Header of every AWS response."""

_OF_OBJECTS = ("GetObject", "PutObject")
"""S3 actions whose responses have an ETag."""

_SHOWN_BYTES = 100


class NotAnAwsResponseError(boto.HTTPClientError):  # type: ignore[misc]
    """The answer did not come from AWS."""

    fmt = "received a response with status {status} that is not from AWS: {shown}"


def answer_of(content: bytes, known: bool) -> dict[str, Any] | None:
    """Return the content of a response in the JSON protocol; None if it is not from AWS.

    A proxy, a gateway or a login page may also respond with status 200. A boto3 client accepts
    this as a response without fields: no messages, or no queues.

    :param known: whether the response has a request id. Only then may it be empty.
    """
    if not content:
        return {} if known else None
    try:
        answer = ujson.loads(content)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _shown(content: bytes) -> str:
    return content[:_SHOWN_BYTES].decode(errors="replace") or "nothing"


def check_protocol(client: Any) -> None:
    """Make a boto3 client reject responses that are not from AWS.

    boto3 accepts an HTML page with status 200 as the confirmation that an object was stored, or
    as the content of a requested object.
    """
    if client.meta.service_model.service_name == "s3":
        client.meta.events.register("before-parse", _reject_foreign_of_s3)
    elif client.meta.service_model.resolved_protocol == "json":
        client.meta.events.register("before-parse", _reject_foreign)


def _reject_foreign(response_dict: Mapping[str, Any], **_: Any) -> None:
    status, content = response_dict["status_code"], response_dict["body"]
    if status < 300 and answer_of(content, _REQUEST_ID in response_dict["headers"]) is None:
        raise NotAnAwsResponseError(status=status, shown=_shown(content))


def _reject_foreign_of_s3(operation_model: Any, response_dict: Mapping[str, Any], **_: Any) -> None:
    status, headers = response_dict["status_code"], response_dict["headers"]
    # S3 sends a request id in every response. Some compatible services do not, but their responses
    # about an object have its ETag, and all others are XML or empty.
    if status >= 300 or "etag" in headers or any(n.lower().startswith("x-amz") for n in headers):
        return
    page = str(headers.get("content-type", "")).lower().startswith("text/html")
    if page or operation_model.name in _OF_OBJECTS:
        content = response_dict["body"]
        if not isinstance(content, bytes):  # a stream
            content = content.read(_SHOWN_BYTES)
        raise NotAnAwsResponseError(status=status, shown=_shown(content))


def _refusal(action: str, status: int, content: bytes) -> boto.ClientError:
    """Return the error of a failed request."""
    value = answer_of(content, known=True)
    if value is None:
        value = {"message": _shown(content)}
    code = str(value.get("__type", "") or status).rsplit("#", 1)[-1]
    reason = value.get("message") or value.get("Message") or ""
    return boto.ClientError(
        {
            "Error": {"Code": code, "Message": str(reason)},
            "ResponseMetadata": {"HTTPStatusCode": status},
        },
        action,
    )
