"""How a message of qdo stands in SQS, both ways; pure functions.

=====================  =====================================================================
body                   the JSON text as it is, so that other producers and consumers
                       understand it; anything else in base64
`qdo-encoding`         `base64`, or `empty` for a body of no bytes, which SQS refuses
`qdo-headers`          headers as a JSON object; other String and Number attributes are
                       headers as well
`qdo-key`              the key, where the message group is not the same text
MessageGroupId         FIFO: the key, or `-` for none
`ExtendedPayloadSize`  the body is in S3, and what stands for it is a pointer of the form
                       that the extended clients of AWS use
=====================  =====================================================================
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import ujson

from qdo.brokers.base import Outgoing
from qdo.errors import UsageError
from qdo.headers import CONTENT_TYPE, RESERVED, is_raw, parsed
from qdo.message import GREGORIAN_OFFSET

TARGET = "AmazonSQS"
"""Begins the names of actions in the protocol of SQS."""

ENCODING = "qdo-encoding"
HEADERS = "qdo-headers"
KEY = "qdo-key"
EXTENDED_SIZE = "ExtendedPayloadSize"
"""Attribute of AWS's extended clients: bytes of the body that is in S3."""
POINTER_CLASS = "software.amazon.payloadoffloading.PayloadS3Pointer"

NO_GROUP = "-"
"""Message group of what has no key: one, so that the order of the queue holds."""
MAX_GROUP = 128
"""Characters of a MessageGroupId, and of a MessageDeduplicationId."""

RECEIVED_ATTRIBUTES = (
    "SentTimestamp",
    "ApproximateReceiveCount",
    "SequenceNumber",
    "MessageGroupId",
)
"""What a receive must ask for as MessageSystemAttributeNames, with all MessageAttributeNames."""

_BASE64 = "base64"
_EMPTY = "empty"
_JSON_TEXT = "String.json"
"""Type of an attribute whose text is JSON, because SQS would not take it plainly."""
_GROUP = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
_REFUSED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""What no text of SQS may hold: what XML 1.0 cannot."""
_MILLISECOND = 10_000
"""In the 100 ns that positions count."""

Attributes = dict[str, dict[str, Any]]


class Pointer(NamedTuple):
    """Where in S3 a body is."""

    bucket: str
    key: str


class Received(NamedTuple):
    """One message as it came from SQS.

    :ivar sent: UUIDv1 time at which SQS took it, to the millisecond.
    :ivar sequence: its SequenceNumber, 0 on a standard queue.
    :ivar message_id: the 128 bits of its MessageId.
    :ivar body: JSON, or bytes where the headers say so; of a message with a `pointer` the text
        of the pointer.
    :ivar headers: JSON object of str to str, or None.
    :ivar receipt: handle to delete or extend it with.
    :ivar group: its message group, None where it has none.
    :ivar receive_count: how often it was received, this time included.
    :ivar pointer: where its body is; None: here.
    :ivar size: bytes of its body there, as its sender says; 0 where that is unknown.
    """

    sent: int
    sequence: int
    message_id: int
    body: bytes
    key: str | None
    headers: str | None
    receipt: str
    group: str | None
    receive_count: int
    pointer: Pointer | None = None
    size: int = 0


# --- sending ---


def entry(message: Outgoing, fifo: bool, dedup: str | None = None) -> dict[str, Any]:
    """Return a message as SendMessageBatch takes it, without its Id and delay.

    :param dedup: deduplication id, of a FIFO queue; None: one of its own.
    :raises UsageError: key or headers hold what is no text.
    """
    text, attributes = encoded(message.body, message.headers, message.queue)
    group = group_of(message.key)
    if message.key is not None and (not fifo or group != message.key or group == NO_GROUP):
        attributes[KEY] = key_attribute(message.key, message.queue)
    made: dict[str, Any] = {"MessageBody": text}
    if attributes:
        made["MessageAttributes"] = attributes
    if fifo:
        made["MessageGroupId"] = group
        made["MessageDeduplicationId"] = dedup_id(dedup) if dedup else str(uuid.uuid4())
    return made


def encoded(body: bytes, headers: str | None, queue: str) -> tuple[str, Attributes]:
    """Return the text of a body, and the attributes that say how to read it, with its headers."""
    attributes: Attributes = {}
    text = _plain(body, headers)
    if text is None:
        text = base64.b64encode(body).decode() if body else _EMPTY
        attributes[ENCODING] = string(_BASE64 if body else _EMPTY)
    if headers is not None:
        attributes[HEADERS] = string(_safe_json(headers, queue))
    return text, attributes


def string(text: str) -> dict[str, Any]:
    """Return an attribute of a text that SQS takes."""
    return {"DataType": "String", "StringValue": text}


def is_storable(text: str) -> bool:
    """Return whether SQS takes a text as the value of an attribute, or as a body."""
    return text != "" and _REFUSED.search(text) is None


def group_of(key: str | None) -> str:
    """Return the message group of a key: the key itself, or a digest where SQS refuses that."""
    if key is None:
        return NO_GROUP
    return key if _GROUP.fullmatch(key) else _digest(key)


def dedup_id(key: str) -> str:
    """Return the deduplication id of a key, as `group_of`."""
    return key if _GROUP.fullmatch(key) else _digest(key)


def size_of(made: Mapping[str, Any]) -> int:
    """Return the bytes of an entry that count for the limit: body, and whole attributes."""
    size = len(made["MessageBody"].encode())
    for name, value in made.get("MessageAttributes", {}).items():
        size += len(name.encode()) + len(value["DataType"].encode())
        size += len(value.get("BinaryValue") or value.get("StringValue", "").encode())
    return size


def pointing(made: Mapping[str, Any], pointer: Pointer, size: int) -> dict[str, Any]:
    """Return an entry whose body is in S3.

    :param size: of the body there, in bytes.
    """
    attributes = {
        name: value
        for name, value in made.get("MessageAttributes", {}).items()
        if name != ENCODING  # bytes are stored as they are
    }
    attributes[EXTENDED_SIZE] = {"DataType": "Number", "StringValue": str(size)}
    place = {"s3BucketName": pointer.bucket, "s3Key": pointer.key}
    body = json.dumps([POINTER_CLASS, place])
    return {**made, "MessageBody": body, "MessageAttributes": attributes}


def _plain(body: bytes, headers: str | None) -> str | None:
    """Return a body as the text that it is, None where it has to be encoded."""
    if headers is not None and is_raw(parsed(headers) or {}):
        return None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if is_storable(text) else None


def _safe_json(headers: str, queue: str) -> str:
    """Return headers with what SQS refuses spelt out."""
    if is_storable(headers):
        return headers
    try:
        headers.encode()
        return json.dumps(json.loads(headers), ensure_ascii=True)
    except ValueError as error:  # stray surrogates as well
        raise _not_text("headers", queue, headers) from error


def key_attribute(key: str, queue: str) -> dict[str, Any]:
    """Return a key as an attribute."""
    if is_storable(key):
        return string(key)
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise _not_text("key", queue, key) from error
    return json_text(key)


def json_text(value: Any) -> dict[str, Any]:
    """Return an attribute that holds JSON."""
    text = json.dumps(value, ensure_ascii=False)
    if not is_storable(text):
        text = json.dumps(value, ensure_ascii=True)
    return {"DataType": _JSON_TEXT, "StringValue": text}


def _not_text(word: str, queue: str, text: str) -> UsageError:
    return UsageError(
        reason=f"the {word} of a message for queue {queue!r} cannot be encoded in UTF-8: {text!r}"
    )


def _digest(text: str) -> str:
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- receiving ---


def received(raw: Mapping[str, Any]) -> Received:
    """Return a message of the answer to ReceiveMessage.

    Whatever foreign producers have put into it: nothing is refused. What cannot be decoded is
    passed on as it stands.

    :param raw: received with `RECEIVED_ATTRIBUTES` and all message attributes.
    """
    system = raw["Attributes"]
    given: Mapping[str, Mapping[str, Any]] = raw.get("MessageAttributes") or _NONE
    group = system.get("MessageGroupId")
    if not given:  # most messages by far
        key = None if group == NO_GROUP else group
        body, headers, pointer = raw["Body"].encode(), None, None
    else:
        key = _key(given, group)
        body, pointer = _body(raw["Body"], given)
        headers = _headers(given)
    return Received(
        int(system["SentTimestamp"]) * _MILLISECOND + GREGORIAN_OFFSET,
        int(system.get("SequenceNumber") or 0),
        int(raw["MessageId"].replace("-", ""), 16),  # a UUID takes half the time of all this
        body,
        key,
        headers,
        raw["ReceiptHandle"],
        group,
        int(system.get("ApproximateReceiveCount", 1)),
        pointer,
        0 if pointer is None else _size(given),
    )


_NONE: Mapping[str, Mapping[str, Any]] = {}


def _key(given: Mapping[str, Mapping[str, Any]], group: str | None) -> str | None:
    attribute = given.get(KEY)
    if attribute is None or "StringValue" not in attribute:
        return None if group == NO_GROUP else group
    text: str = attribute["StringValue"]
    if attribute["DataType"] == _JSON_TEXT:
        try:
            found = json.loads(text)
        except ValueError:
            return text
        return found if isinstance(found, str) else text
    return text


def _body(text: str, given: Mapping[str, Mapping[str, Any]]) -> tuple[bytes, Pointer | None]:
    if EXTENDED_SIZE in given:
        pointer = pointer_of(text)
        if pointer is not None:
            return text.encode(), pointer
    encoding = given.get(ENCODING, _NONE).get("StringValue")
    if encoding == _EMPTY:
        return b"", None
    if encoding == _BASE64:
        try:
            return base64.b64decode(text, validate=True), None
        except binascii.Error:
            pass  # it is evidence
    return text.encode(), None


def _size(given: Mapping[str, Mapping[str, Any]]) -> int:
    """Return what is said of the size of a body in S3; it is bytes of AWS's clients, mostly."""
    text = str(given[EXTENDED_SIZE].get("StringValue", ""))
    return int(text) if len(text) < 16 and text.isascii() and text.isdigit() else 0


def without_body(message: Received) -> Received:
    """Return a message whose body is gone from S3: one that cannot be decoded.

    No bytes at all are a body where the headers say that it is no JSON, so they say so no more.
    """
    headers = parsed(message.headers)
    if headers and headers.pop(CONTENT_TYPE, None) is not None:
        text = ujson.dumps(headers, ensure_ascii=False, escape_forward_slashes=False)
        message = message._replace(headers=text)
    return message._replace(body=b"")


def pointer_of(text: str) -> Pointer | None:
    """Return the place in S3 that the body of a message names, None where it is none."""
    try:
        name, place = json.loads(text)
        bucket, key = place["s3BucketName"], place["s3Key"]
    except (ValueError, TypeError, KeyError):
        return None
    if name != POINTER_CLASS or not isinstance(bucket, str) or not isinstance(key, str):
        return None
    return Pointer(bucket, key)


def _headers(given: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return headers: those that qdo wrote, over the attributes of other producers."""
    own = given.get(HEADERS, _NONE).get("StringValue")
    foreign = {
        CONTENT_TYPE if name.lower() == CONTENT_TYPE else name: value["StringValue"]
        for name, value in given.items()
        if "StringValue" in value and not name.startswith(RESERVED) and name != EXTENDED_SIZE
    }
    if not foreign:
        return own
    known = parsed(own)
    if known is None:
        return own  # its message cannot be decoded, and says so
    return ujson.dumps({**foreign, **known}, ensure_ascii=False, escape_forward_slashes=False)
