"""Encode messages for SQS, and decode received messages, with their pointers and positions.

All functions are pure.

=====================  =====================================================================
body                   plain JSON text, which other producers and consumers understand;
                       anything else in base64
`qdo-encoding`         `base64`, or `empty` for an empty body, which SQS rejects
`qdo-headers`          headers as a JSON object; other String and Number attributes become
                       headers as well
`qdo-key`              the key, if it differs from the message group
MessageGroupId         FIFO: the key, or `-` without one
=====================  =====================================================================

A message with its body in S3 has a pointer, in the formats of AWS's extended clients:

- The current format has the attribute `ExtendedPayloadSize` and the class
  `software.amazon.payloadoffloading.PayloadS3Pointer` in the body.
- The legacy format has `SQSLargePayloadSize` and `com.amazon.sqs.javamessaging.MessageS3Pointer`.

The clients mix the two formats. By default, the Java client 2.x writes the legacy attribute with
the current class. The Python client writes the legacy format with `use_legacy_attribute`. Some
clients request or recognize only one of the attributes. So qdo reads every combination, and writes
both attributes with the current class. All supported clients can read this combination.

SQS has no positions. The owner makes a position from a message's send time and identity when it
receives the message:

======================  ===========================================================================
bits                    content
======================  ===========================================================================
256 and above           a UUIDv1 time: when it was sent, or a little more where messages received
                        before it were sent later; grows with every message that is received
128 to 255              its SequenceNumber, 0 in a standard queue
0 to 127                its MessageId
======================  ===========================================================================

So the positions of one owner increase in the order of receipt, as the engine requires. `last` is
the recorded time. The lower 256 bits identify the message for every owner.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.base import Outgoing
from qdo.encoding import (
    CONTENT_TYPE,
    RESERVED,
    decoded_headers,
    is_raw,
    parsed,
    text_headers,
    undecodable_headers,
    unreadable,
    with_body_kind,
)
from qdo.errors import UsageError
from qdo.positions import GREGORIAN_OFFSET, Positions
from qdo.text import describe

# The attributes that mark a body as a pointer; their value is the size of the real body in bytes.
SIZE_MARKERS = ("ExtendedPayloadSize", "SQSLargePayloadSize")
POINTER_CLASS = "software.amazon.payloadoffloading.PayloadS3Pointer"
LEGACY_POINTER_CLASS = "com.amazon.sqs.javamessaging.MessageS3Pointer"

_MOST_DIGITS = 15
_MAX_KEY_BYTES = 1024
# The prefix of action names in the SQS protocol.
TARGET = "AmazonSQS"
ENCODING = "qdo-encoding"
HEADERS = "qdo-headers"
KEY = "qdo-key"
# The message group of all messages without a key. A single group preserves the queue's order.
NO_GROUP = "-"
# The MessageSystemAttributeNames of a receive call, in addition to all MessageAttributeNames.
RECEIVED_ATTRIBUTES = (
    "SentTimestamp",
    "ApproximateReceiveCount",
    "SequenceNumber",
    "MessageGroupId",
)
_BASE64 = "base64"
_EMPTY = "empty"
# The type of an attribute with JSON text, for values that SQS rejects as plain text.
_JSON_TEXT = "String.json"
_GROUP = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
# The characters that SQS rejects in any text, because XML 1.0 cannot represent them.
_REFUSED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
# A millisecond in units of 100 ns, like positions.
_MILLISECOND = 10_000
Attributes = dict[str, dict[str, Any]]
_NONE: Mapping[str, Mapping[str, Any]] = {}
_NAME_BITS = 256
_NAME = (1 << _NAME_BITS) - 1
_ID_BITS = 128
_ID = (1 << _ID_BITS) - 1


def pointer_entry(
    made: Mapping[str, Any], attributes: Mapping[str, Any], pointer: BodyPointer, size: int
) -> dict[str, Any]:
    """Return a SendMessageBatch entry with a pointer to a body of `size` bytes in S3."""
    number = {"DataType": "Number", "StringValue": str(size)}
    place = {"s3BucketName": pointer.bucket, "s3Key": pointer.key}
    return {
        **made,
        "MessageBody": json.dumps([POINTER_CLASS, place]),
        "MessageAttributes": {**attributes, **dict.fromkeys(SIZE_MARKERS, number)},
    }


def pointer_of(text: str, attributes: Mapping[str, Mapping[str, Any]]) -> BodyPointer | None:
    """Return the location in S3 that a message points to; None if its body is not a pointer."""
    if not any(name in attributes for name in SIZE_MARKERS):
        return None
    try:
        name, place = json.loads(text)
        bucket = place["s3BucketName"]
        key = place["s3Key"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if name not in (POINTER_CLASS, LEGACY_POINTER_CLASS):
        return None
    if not isinstance(bucket, str) or not isinstance(key, str):
        return None
    if not 0 < len(key.encode("utf-8", "replace")) <= _MAX_KEY_BYTES:
        return None  # boto3 or S3 would reject such a key
    return BodyPointer(bucket, key)


def stated_size(attributes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of a body in S3 according to its sender; 0 if it is missing or invalid."""
    for name in SIZE_MARKERS:
        text = str(attributes.get(name, {}).get("StringValue", ""))
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
            return int(text)
    return 0


class Received(NamedTuple):
    """A message received from SQS."""

    # The UUIDv1 time at which SQS stored the message, precise to the millisecond.
    sent: int
    # The SequenceNumber of the message; 0 in a standard queue.
    sequence: int
    # The MessageId of the message, as a number of 128 bits.
    message_id: int
    # The JSON body, or bytes if the headers say so. With a `pointer`, the body is the pointer's
    # text.
    body: bytes
    key: str | None
    # A JSON object of str to str, or None.
    headers: str | None
    # The receipt handle, to delete or extend the message.
    receipt: str
    group: str | None
    # The number of receives of the message, including this one.
    receive_count: int
    # The location of the body in S3; None: the body is in the message.
    pointer: BodyPointer | None = None
    # The size in bytes of the body in S3, according to the sender; 0 if it is unknown.
    size: int = 0


def entry(message: Outgoing, fifo: bool, dedup: str | None = None) -> dict[str, Any]:
    """Return the SendMessageBatch entry of a message, without its Id and delay.

    :param dedup: the deduplication key, for a FIFO queue; None: use a random id.
    """
    text, attributes = encode_message(message.body, message.headers, message.queue)
    group = group_of(message.key)
    if message.key is not None and (not fifo or group != message.key or group == NO_GROUP):
        attributes[KEY] = key_attribute(message.key, message.queue)
    made: dict[str, Any] = {"MessageBody": text}
    if attributes:
        made["MessageAttributes"] = attributes
    if fifo:
        made["MessageGroupId"] = group
        made["MessageDeduplicationId"] = group_of(dedup) if dedup else str(uuid.uuid4())
    return made


def encode_message(body: bytes, headers: str | None, queue: str) -> tuple[str, Attributes]:
    """Return the text of a body, and the attributes with its encoding and headers."""
    attributes: Attributes = {}
    text = _plain(body, headers)
    if text is None:
        text = base64.b64encode(body).decode() if body else _EMPTY
        attributes[ENCODING] = string(_BASE64 if body else _EMPTY)
    if headers is not None:
        attributes[HEADERS] = string(_safe_json(headers, queue))
    return text, attributes


def string(text: str) -> dict[str, Any]:
    """Return a String attribute for a text that SQS accepts; see `is_storable`."""
    return {"DataType": "String", "StringValue": text}


def is_storable(text: str) -> bool:
    """Return whether SQS accepts a text as an attribute value or a body."""
    return text != "" and _REFUSED.search(text) is None


def group_of(key: str | None) -> str:
    """Return the message group of a key: the key itself, or a digest if SQS rejects the key."""
    # Callers also use this for deduplication ids, which have the same limits.
    if key is None:
        return NO_GROUP
    return key if _GROUP.fullmatch(key) else _digest(key)


def size_of(made: Mapping[str, Any]) -> int:
    """Return the size of an entry as SQS counts it: the body and all attributes."""
    size = len(made["MessageBody"].encode())
    for name, value in made.get("MessageAttributes", {}).items():
        size += len(name.encode()) + len(value["DataType"].encode())
        size += len(value.get("BinaryValue") or value.get("StringValue", "").encode())
    return size


def pointing(made: Mapping[str, Any], pointer: BodyPointer, size: int) -> dict[str, Any]:
    attributes = {
        name: value
        for name, value in made.get("MessageAttributes", {}).items()
        if name != ENCODING  # S3 stores the plain bytes
    }
    return pointer_entry(made, attributes, pointer, size)


def _plain(body: bytes, headers: str | None) -> str | None:
    """Return a body as text; None if SQS would reject the text."""
    if headers is not None and is_raw(parsed(headers) or {}):
        return None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if is_storable(text) else None


def _safe_json(headers: str, queue: str) -> str:
    """Return headers after escaping the characters that SQS rejects."""
    if is_storable(headers):
        return headers
    try:
        headers.encode()
        return json.dumps(json.loads(headers), ensure_ascii=True)
    except ValueError as error:  # also raised for stray surrogates
        raise _not_text("headers", queue, headers) from error


def key_attribute(key: str, queue: str) -> dict[str, Any]:
    if is_storable(key):
        return string(key)
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise _not_text("key", queue, key) from error
    return json_text(key)


def json_text(value: Any) -> dict[str, Any]:
    text = json.dumps(value, ensure_ascii=False)
    if not is_storable(text):
        text = json.dumps(value, ensure_ascii=True)
    return {"DataType": _JSON_TEXT, "StringValue": text}


def _not_text(word: str, queue: str, text: str) -> UsageError:
    return UsageError(
        reason=f"the {word} of a message for queue {queue!r} must not contain surrogate "
        f"characters, which UTF-8 cannot encode, got {text!r}"
    )


def _digest(text: str) -> str:
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def decode_received(raw: Mapping[str, Any], *, own: bool = False) -> Received:
    """Decode one message of a ReceiveMessage response.

    :param own: whether qdo wrote the message, so that its headers state the type of the body.
    :param raw: the message, received with `RECEIVED_ATTRIBUTES` and all message attributes.
    """
    # Accept any content, because a faulty message must not harm other messages. The worker cannot
    # decode a faulty message, and applies the queue's policy.
    system = raw["Attributes"]
    given: Mapping[str, Mapping[str, Any]] = raw.get("MessageAttributes") or _NONE
    group = system.get("MessageGroupId")
    try:
        content = _content(raw["Body"], given, group, own)
    except Exception as error:  # noqa: BLE001 - other messages must not wait
        body = raw["Body"].encode("utf-8", "backslashreplace")
        content = _Content(body, _group_key(group), unreadable(describe(error)), None)
    return Received(
        int(system["SentTimestamp"]) * _MILLISECOND + GREGORIAN_OFFSET,
        int(system.get("SequenceNumber") or 0),
        int(raw["MessageId"].replace("-", ""), 16),  # uuid.UUID would double the decoding time
        content.body,
        content.key,
        content.headers,
        raw["ReceiptHandle"],
        group,
        int(system.get("ApproximateReceiveCount", 1)),
        content.pointer,
        0 if content.pointer is None else stated_size(given),
    )


class _Content(NamedTuple):
    body: bytes
    key: str | None
    headers: str | None
    pointer: BodyPointer | None


def _content(
    text: str, given: Mapping[str, Mapping[str, Any]], group: str | None, own: bool
) -> _Content:
    if not given:  # most messages have no attributes
        body = text.encode()
        pointer = None
        key = _group_key(group)
        headers = None
    else:
        key = _key(given, group)
        body, pointer = _body(text, given)
        headers = _headers(given)
    if not own and pointer is None and ENCODING not in given:
        headers = with_body_kind(body, headers)
    return _Content(body, key, headers, pointer)


def _key(given: Mapping[str, Mapping[str, Any]], group: str | None) -> str | None:
    attribute = given.get(KEY)
    if attribute is None or "StringValue" not in attribute:
        return _group_key(group)
    text: str = attribute["StringValue"]
    if attribute["DataType"] == _JSON_TEXT:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return found if isinstance(found, str) else text
    return text


def _group_key(group: str | None) -> str | None:
    return None if group == NO_GROUP else group


def _body(text: str, given: Mapping[str, Mapping[str, Any]]) -> tuple[bytes, BodyPointer | None]:
    pointer = pointer_of(text, given)
    if pointer is not None:
        return text.encode(), pointer
    encoding = given.get(ENCODING, _NONE).get("StringValue")
    if encoding == _EMPTY:
        return b"", None
    if encoding == _BASE64:
        try:
            return base64.b64decode(text, validate=True), None
        except ValueError:  # the text is not base64, or not ASCII
            pass  # keep the text, because it helps to find the faulty producer
    return text.encode(), None


def _headers(given: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the attributes of other producers, updated with the headers that qdo wrote."""
    own = given.get(HEADERS, _NONE).get("StringValue")
    foreign = {
        CONTENT_TYPE if name.lower() == CONTENT_TYPE else name: value["StringValue"]
        for name, value in given.items()
        if "StringValue" in value and not name.startswith(RESERVED) and name not in SIZE_MARKERS
    }
    if own is None and not foreign:
        return None
    known = decoded_headers(own)
    if known is None:
        return undecodable_headers(own)
    if not foreign and own is not None:
        return text_headers(known, own)
    written = json.dumps({**foreign, **known}, ensure_ascii=False)
    return text_headers({**foreign, **known}, written)


class SqsPositions(Positions):
    """Positions that contain a time and an identity; see the module's docstring."""

    stable = False

    def resume_after(self, last: int, position: str | None) -> int:
        return last << _NAME_BITS

    def to_time(self, position: int) -> int:
        return position >> _NAME_BITS

    def identity(self, position: int) -> int:
        return position & _NAME

    def not_before(self, position: int, done: int) -> int:
        if position > done:
            return position
        return ((self.to_time(done) + 1) << _NAME_BITS) | self.identity(position)

    def message_id(self, position: int, node: int) -> str:
        return str(uuid.UUID(int=position & _ID))


SQS_POSITIONS = SqsPositions()


def make_position(moment: int, sequence: int, message_id: int) -> int:
    """Return the position of a message; `moment` is a UUIDv1 time."""
    return (moment << _NAME_BITS) | (sequence << _ID_BITS) | message_id


def sequence_of(position: int) -> int:
    """Return the SequenceNumber of a message; 0 in a standard queue."""
    return (position & _NAME) >> _ID_BITS
