"""Errors of SQS, and functions of the values of a request."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_QUERY_PREFIX = "AWS.SimpleQueueService."
_CODES = {
    "QueueDoesNotExist": _QUERY_PREFIX + "NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    "ReceiptHandleIsInvalid": "ReceiptHandleIsInvalid",
    "InvalidAttributeName": "InvalidAttributeName",
    "InvalidAttributeValue": "InvalidAttributeValue",
    "InvalidMessageContents": "InvalidMessageContents",
    "InvalidParameterValue": "InvalidParameterValue",
    "MissingParameter": "MissingParameter",
}
"""Their names in the query protocol, which botocore uses. All others have the prefix."""


class SqsError(Exception):
    """An error response of SQS.

    :ivar code: the name of its shape.
    """

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status

    @property
    def query_code(self) -> str:
        """The code that botocore reports."""
        return _CODES.get(self.code, _QUERY_PREFIX + self.code)

    def entry(self, identity: str) -> dict[str, Any]:
        """Return the error as the failure of one entry of a batch."""
        fault = self.status < 500
        return {"Id": identity, "SenderFault": fault, "Code": self.code, "Message": self.message}


def missing_queue() -> SqsError:
    return SqsError("QueueDoesNotExist", "The specified queue does not exist.")


def invalid(name: str, value: object, reason: str) -> SqsError:
    return SqsError(
        "InvalidParameterValue", f"Value {value} for parameter {name} is invalid. Reason: {reason}"
    )


def within(request: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """Return a number of a request; reject it outside its bounds."""
    value = request.get(name)
    if value is None:
        return default
    if not low <= int(value) <= high:
        raise invalid(name, value, f"Must be >= {low} and <= {high}, if provided.")
    return int(value)


def size(body: str, attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the bytes of a message that count against the limits."""
    total = len(body.encode(errors="surrogatepass"))
    for name, value in attributes.items():
        if "BinaryValue" in value:
            data = len(base64.b64decode(value["BinaryValue"]))
        else:
            data = len(value.get("StringValue", "").encode())
        total += len(name.encode()) + len(value["DataType"].encode()) + data
    return total


def check_body(body: str) -> None:
    """Reject a body with a character that SQS does not accept."""
    if not body:
        raise SqsError("MissingParameter", "The request must contain the parameter MessageBody.")
    if _FORBIDDEN.search(body):
        raise SqsError("InvalidMessageContents", "Invalid characters found in the message body.")


def check_attributes(attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Reject attributes that are too many, have no type or are empty."""
    if len(attributes) > 10:
        raise invalid("MessageAttributes", len(attributes), "At most 10 attributes are allowed.")
    for name, value in attributes.items():
        kind = value.get("DataType", "").partition(".")[0]
        if kind not in ("String", "Number", "Binary"):
            raise SqsError(
                "InvalidParameterValue", f"The type of message attribute '{name}' is invalid."
            )
        if not value.get("BinaryValue" if kind == "Binary" else "StringValue"):
            raise SqsError(
                "InvalidParameterValue", f"Message attribute '{name}' must have a value."
            )


def check_entries(entries: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    """Reject an empty or too large batch, or one with duplicate ids."""
    if not entries:
        raise SqsError("EmptyBatchRequest", "There should be at least one entry in the request.")
    if len(entries) > 10:
        raise SqsError(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are 10. You have sent {len(entries)}.",
        )
    names = [entry.get("Id", "") for entry in entries]
    for name in names:
        if not re.fullmatch(r"[\w-]{1,80}", name, flags=re.ASCII):
            raise SqsError("InvalidBatchEntryId", f"Id {name!r} is invalid.")
    if len(set(names)) < len(names):
        raise SqsError("BatchEntryIdsNotDistinct", "Ids are not distinct.")
    return entries
