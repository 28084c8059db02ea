"""Messages of somebody who may send to the queue, and means no good: each costs itself only."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.sqs.codec import decode_received
from qdo.brokers.sqs.dead_letter_codec import letter_entry, letter_of
from qdo.encoding import parsed
from tests.support.aws.messages import received_message

DEEP = "[" * 5000


def text(value: str, kind: str = "String") -> dict[str, str]:
    return {"DataType": kind, "StringValue": value}


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "base64 that is not ASCII": ("café", {"qdo-encoding": text("base64")}),
    "a deep pointer": (DEEP, {"ExtendedPayloadSize": text("1", "Number")}),
    "a deep key": ("1", {"qdo-key": text(DEEP, "String.json")}),
    "deep headers": ("1", {"qdo-headers": text(DEEP)}),
    "deep headers and others": ("1", {"qdo-headers": text(DEEP), "a": text("b")}),
    "a content type that is no text": ("1", {"qdo-headers": text('{"content-type": 5}')}),
    "half of a pair in headers": ("1", {"qdo-headers": text('{"a": "\\ud800"}')}),
    "both, and others": ("x", {"qdo-headers": text('{"a": "\\ud800", "b": []}'), "c": text("d")}),
    "half of a pair in the body": ("\ud800", {}),
    "an attribute without a type": ("1", {"qdo-key": {"StringValue": "1"}}),
    "a size that is no number": ("[]", {"ExtendedPayloadSize": {"StringValue": 5}}),
    "a pointer to nothing": (
        '["software.amazon.payloadoffloading.PayloadS3Pointer",{"s3BucketName":"b","s3Key":""}]',
        {"ExtendedPayloadSize": text("1", "Number")},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_becomes_a_dead_letter(name: str) -> None:
    """It has its receipt, so it is deleted then; it is sent to SQS as UTF-8, and read again."""
    found = decode_received(received_message(*HOSTILE[name]))
    assert (found.receipt, found.pointer) == ("handle", None)
    assert all(isinstance(value, str) for value in (parsed(found.headers) or {}).values())
    made = entry_of(found.body, found.key, found.headers)
    again = letter_of(received_message(made["MessageBody"], made["MessageAttributes"]))
    assert again is not None
    assert (again.record.body, again.record.key) == (found.body, found.key)


def entry_of(body: bytes, key: str | None = None, headers: str | None = None) -> dict[str, Any]:
    """Return the entry of a dead letter, which can be sent."""
    letter = DeadLetterRecord("q", 1, body, key, headers, "e", "", 1, "w", 1, 1.0)
    made = letter_entry(letter, fifo=False)
    json.dumps(made, ensure_ascii=False).encode()
    return made


def test_headers_that_are_no_text_are_stored_spelled_out() -> None:
    """A broken header may hold anything; its message must not wait for ever because of it."""
    made = entry_of(b"1", "\ud800", "{\x00\ud800")
    headers = made["MessageAttributes"]["qdo-headers"]["StringValue"]
    assert json.loads(headers) == "{\x00\ud800"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue", 5),
        ("queue", "a/b"),
        ("queue", ""),
        ("position", -1),
        ("position", "9" * 5000),
        ("position", [[]]),
        ("error", None),
        ("attempts", "x"),
        ("worker", {}),
        ("fence", 1e400),
        ("dead_at", "nan"),
    ],
)
def test_a_forged_letter_is_not_a_dead_letter(field: str, value: Any) -> None:
    """It stays where it is, and hides no other."""
    made = entry_of(b"1")
    fields = json.loads(made["MessageAttributes"]["qdo-dead-letter"]["StringValue"])
    for changed, expected in (({}, True), ({field: value}, False)):
        forged = text(json.dumps({**fields, **changed}), "String.json")
        attributes = {**made["MessageAttributes"], "qdo-dead-letter": forged}
        found = letter_of(received_message(made["MessageBody"], attributes))
        assert (found is not None) is expected


@pytest.mark.parametrize("attribute", ["qdo-dead-letter", "qdo-traceback"])
def test_a_letter_of_deep_json_is_not_a_dead_letter(attribute: str) -> None:
    """RecursionError is not a ValueError."""
    made = entry_of(b"1")
    attributes = {**made["MessageAttributes"], attribute: text(DEEP, "String.json")}
    assert letter_of(received_message(made["MessageBody"], attributes)) is None
