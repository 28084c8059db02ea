"""Encoding of messages as Kinesis records.

A message without headers is stored as its body: JSON text, which every other consumer can read. A
message with headers is stored as a JSON object. It contains the body as it is, or in base64 if the
body is bytes::

    {"qdo-headers":{"trace":"7"},"body":{"n":1}}
    {"qdo-headers":{"content-type":"image/png"},"base64":"iVBORw0KGgo="}

The message key is the record's partition key. A message without a key gets a random partition key
with a prefix that marks it, which distributes such messages over the shards. Records of other
producers become messages without headers. If they are not JSON, their body is bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid

from qdo.encoding import is_raw, parsed, text_headers, undecodable_headers, with_body_kind
from qdo.errors import MessageTooLargeError, UsageError

MAX_KEY = 256
"""Characters of a partition key."""
RECORD_BYTES = 1_048_576
"""Body, envelope and partition key, unless the stream is configured to allow larger records."""
MAX_BODY_BYTES = RECORD_BYTES - 4 * MAX_KEY
"""Largest body without headers that fits beside any key."""

_KEYLESS = "qdo-no-key-"
_OPENING = b'{"qdo-headers":'
_JSON_PART = b',"body":'
_RAW_PART = b',"base64":"'
_decoder = json.JSONDecoder()


def partition_key(key: str | None, queue: str) -> str:
    """Return the partition key of a message.

    :raises UsageError: Kinesis cannot store this key.
    """
    if key is None:
        return _KEYLESS + uuid.uuid4().hex
    reason = _key_error(key)
    if reason:
        raise UsageError(
            reason=f"key of a message for queue {queue!r} must {reason}, got {key[:300]!r}"
        )
    return key


def _key_error(key: str) -> str | None:
    if not 1 <= len(key) <= MAX_KEY:
        return f"have 1 to {MAX_KEY} characters (this one has {len(key)})"
    if key.startswith(_KEYLESS):
        return f"not begin with {_KEYLESS!r}, which marks messages without a key"
    return None if _is_storable(key) else "be valid UTF-8"


def key_of(partition: str | None) -> str | None:
    """Return the key of a message, None if it was sent without one."""
    return None if partition is None or partition.startswith(_KEYLESS) else partition


def encoded(body: bytes, headers: str | None, queue: str) -> bytes:
    """Encode a message as the data of a record.

    :raises UsageError: the headers cannot be encoded in UTF-8.
    """
    if headers is None and not body.startswith(_OPENING):
        return body
    text = headers or "{}"
    if not _is_storable(text):
        raise UsageError(
            reason=f"the headers of a message for queue {queue!r} must not contain surrogate "
            f"characters, which UTF-8 cannot encode, got {text[:300]!r}"
        )
    if not _is_object(text):
        text = json.dumps(text)  # headers that are not a JSON object are stored as a string
    if is_raw(parsed(headers) or {}) or not _is_utf8(body):
        return _OPENING + text.encode() + _RAW_PART + base64.b64encode(body) + b'"}'
    return _OPENING + text.encode() + _JSON_PART + body + b"}"


def check_size(queue: str, data: bytes, partition: str, limit: int) -> int:
    """Return the size of a record.

    :raises MessageTooLargeError: the record is too large.
    """
    size = len(data) + len(partition.encode())
    if size > limit:
        raise MessageTooLargeError(queue=queue, size=size, limit=limit)
    return size


def decoded(data: bytes) -> tuple[bytes, str | None]:
    """Decode the data of a record to body and headers."""
    if data.startswith(_OPENING):
        found = _unwrap(data)
        if found is not None:
            return found
    return data, with_body_kind(data, None)


def _unwrap(data: bytes) -> tuple[bytes, str | None] | None:
    """Return body and headers in an envelope; None if the data only begins like one."""
    try:
        text = data[len(_OPENING) :].decode()
        headers, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    written = text[:end]
    rest = text[end:].encode()
    body = _body(rest)
    if body is None or not isinstance(headers, (dict, str)):
        return None
    if isinstance(headers, str):
        return body, undecodable_headers(headers)
    return body, text_headers(headers, written) if headers else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _body(rest: bytes) -> bytes | None:
    if rest.startswith(_JSON_PART) and rest.endswith(b"}"):
        return rest[len(_JSON_PART) : -1]
    if rest.startswith(_RAW_PART) and rest.endswith(b'"}'):
        try:
            return base64.b64decode(rest[len(_RAW_PART) : -2], validate=True)
        except binascii.Error:
            return None
    return None


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a stray surrogate
        return False
    return True
