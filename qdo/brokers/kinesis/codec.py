"""Encode messages as Kinesis records, and decode records, including aggregated records.

The record of a message without headers is the body: JSON text, which every other consumer can read.
The record of a message with headers is a JSON object. The object contains the body unchanged, or in
base64 if the body is bytes::

    {"qdo-headers":{"trace":"7"},"body":{"n":1}}
    {"qdo-headers":{"content-type":"image/png"},"base64":"iVBORw0KGgo="}

The message key is the record's partition key. A message without a key gets a random partition key
with a special prefix. Random keys distribute such messages over the shards. Records of other
producers become messages without headers. If a record is not JSON, the body of its message is
bytes.

The Kinesis Producer Library packs many messages into one record: four magic bytes, a Protocol
Buffers message, and its MD5 digest. AWS published the format in awslabs/amazon-kinesis-producer,
aggregation-format.md. qdo parses records with Google's `protobuf`, not with AWS's Python module,
aws-kinesis-agg. AWS's module changes `sys.path` on import, had its last release in 2022, and keeps
messages of other shards. The tests read records that aws-kinesis-agg packed.

After a reshard, a record may contain messages of other shards, because the producer packs messages
by the shards that it knows. The producer then sends these messages to the right shards again. Like
KCL, this module drops the misplaced copies.

Any program that may write to the stream can write an aggregated record. So this module checks the
content against the limits of Kinesis before it makes messages. 100,000 messages take half a second
or more; meanwhile, the other queues of the process continue.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from qdo.encoding import is_raw, is_utf8, parsed, text_headers, undecodable_headers, with_body_kind
from qdo.errors import MessageTooLargeError, UsageError
from qdo.system.clock import paced

# The maximum number of characters of a partition key.
MAX_KEY = 256
# The maximum size of body, envelope and key in bytes, unless the stream allows larger records.
RECORD_BYTES = 1_048_576
# The largest body without headers that fits into a record with any key.
MAX_BODY_BYTES = RECORD_BYTES - 4 * MAX_KEY

_KEYLESS = "qdo-no-key-"
_OPENING = b'{"qdo-headers":'
_JSON_PART = b',"body":'
_RAW_PART = b',"base64":"'
_decoder = json.JSONDecoder()
_MAGIC = b"\xf3\x89\x9a\xc2"
_DIGEST_BYTES = 16
_MAX_HASH_DIGITS = 39
# The maximum number of messages in one record. A record of 1 MiB could hold 170,000 messages
# without a body, which would need 60 MB in a worker. No real producer sends such records.
MAX_MESSAGES = 100_000
_T = TypeVar("_T")
_Field = descriptor_pb2.FieldDescriptorProto
_STRINGS = (_Field.TYPE_STRING, _Field.LABEL_REPEATED)


def partition_key(key: str | None, queue: str) -> str:
    """Return the partition key of a message; raise UsageError if Kinesis cannot store it."""
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
    return None if is_utf8(key) else "be valid UTF-8"


def key_of(partition: str | None) -> str | None:
    """Return the key of a message; None if the sender set no key."""
    return None if partition is None or partition.startswith(_KEYLESS) else partition


def encoded(body: bytes, headers: str | None, queue: str) -> bytes:
    """Encode a message as record data; raise UsageError if the headers are not valid UTF-8."""
    if headers is None and not body.startswith(_OPENING):
        return body
    text = headers or "{}"
    if not is_utf8(text):
        raise UsageError(
            reason=f"the headers of a message for queue {queue!r} must not contain surrogate "
            f"characters, which UTF-8 cannot encode, got {text[:300]!r}"
        )
    if not _is_object(text):
        text = json.dumps(text)  # store headers that are not a JSON object as a string
    if is_raw(parsed(headers) or {}) or not _is_utf8(body):
        return _OPENING + text.encode() + _RAW_PART + base64.b64encode(body) + b'"}'
    return _OPENING + text.encode() + _JSON_PART + body + b"}"


def check_size(queue: str, data: bytes, partition: str, limit: int) -> int:
    """Return the size of a record; raise MessageTooLargeError if it is too large."""
    size = len(data) + len(partition.encode())
    if size > limit:
        raise MessageTooLargeError(queue=queue, size=size, limit=limit)
    return size


def decoded(data: bytes) -> tuple[bytes, str | None]:
    if data.startswith(_OPENING):
        found = _unwrap(data)
        if found is not None:
            return found
    return data, with_body_kind(data, None)


def _unwrap(data: bytes) -> tuple[bytes, str | None] | None:
    """Return the body and headers in an envelope; None if the data is not an envelope."""
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


class Unpacked(NamedTuple):
    """One message of an aggregated record."""

    subsequence: int
    partition_key: str
    data: bytes


def is_aggregated(data: bytes) -> bool:
    """Return whether a record begins with the magic bytes of an aggregated record."""
    return data.startswith(_MAGIC)


def unpack(data: bytes, hash_keys: tuple[int, int] | None) -> list[Unpacked] | None:
    """Return the messages of an aggregated record; None for an ordinary record.

    :param hash_keys: the shard's first and last hash key, to drop messages of other shards. None:
        keep all messages.
    :raises ValueError: the digest is valid, but the content is not from a producer library.
    """
    packed = data[len(_MAGIC) : -_DIGEST_BYTES]
    digest = hashlib.md5(packed, usedforsecurity=False).digest()
    if not is_aggregated(data) or digest != data[-_DIGEST_BYTES:]:
        return None
    try:
        record = _aggregated.FromString(packed)
    except DecodeError as error:
        raise ValueError(f"it is not an aggregated record: {error}") from error
    if len(record.records) > MAX_MESSAGES:
        raise ValueError(f"it has {len(record.records)} messages, more than {MAX_MESSAGES}")
    # Copy the tables, because each access to a table makes a new string. Without the copies, one
    # key of 68,000 messages took 34 GB.
    keys = [_checked_key(text) for text in record.partition_key_table]
    hashes = [_checked_hash(text) for text in record.explicit_hash_key_table]
    return list(_messages(record.records, keys, hashes, hash_keys))


def _messages(
    records: Any, keys: list[str], hashes: list[int | None], hash_keys: tuple[int, int] | None
) -> Iterator[Unpacked]:
    for number, each in enumerate(paced(records)):
        key = _entry(keys, each.partition_key_index, "partition key")
        stated = None
        if hashes and each.HasField("explicit_hash_key_index"):
            stated = _entry(hashes, each.explicit_hash_key_index, "hash key")
        if hash_keys is None or _within(key, stated, hash_keys):
            yield Unpacked(number, key, each.data)


def _within(key: str, stated: int | None, hash_keys: tuple[int, int]) -> bool:
    value = hash_key(key) if stated is None else stated
    return hash_keys[0] <= value <= hash_keys[1]


def _entry(table: list[_T], index: int, name: str) -> _T:
    if index >= len(table):
        raise ValueError(f"a message has {name} {index} of {len(table)}")
    return table[index]


def _checked_key(text: Any) -> str:
    if not isinstance(text, str):  # protobuf returns bytes for invalid UTF-8
        raise ValueError("a partition key is not UTF-8")
    if len(text) > MAX_KEY:
        raise ValueError(f"a partition key has {len(text)} characters, more than {MAX_KEY}")
    return text


def _checked_hash(text: Any) -> int | None:
    """Return the hash key in a text; None for an empty text, so that the partition key decides."""
    if not isinstance(text, str):
        raise ValueError("a hash key is not UTF-8")
    if len(text) > _MAX_HASH_DIGITS:
        raise ValueError(f"a hash key has {len(text)} characters, more than {_MAX_HASH_DIGITS}")
    return int(text) if text.isdecimal() else None


def hash_key(partition_key: str) -> int:
    """Return the hash key that determines the shard of a partition key."""
    digest = hashlib.md5(partition_key.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest, "big")


def _make_aggregated_record() -> Any:
    """Build the class of the outer message from a descriptor, and return the class."""
    file = descriptor_pb2.FileDescriptorProto(
        name="qdo/kinesis_aggregation.proto", package="qdo.kinesis", syntax="proto2"
    )
    record = file.message_type.add(name="Record")
    _add(record, "partition_key_index", 1, _Field.TYPE_UINT64, _Field.LABEL_REQUIRED)
    _add(record, "explicit_hash_key_index", 2, _Field.TYPE_UINT64, _Field.LABEL_OPTIONAL)
    _add(record, "data", 3, _Field.TYPE_BYTES, _Field.LABEL_REQUIRED)
    outer = file.message_type.add(name="AggregatedRecord")
    _add(outer, "partition_key_table", 1, *_STRINGS)
    _add(outer, "explicit_hash_key_table", 2, *_STRINGS)
    field = _add(outer, "records", 3, _Field.TYPE_MESSAGE, _Field.LABEL_REPEATED)
    field.type_name = ".qdo.kinesis.Record"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("qdo.kinesis.AggregatedRecord")
    )


def _add(message: Any, name: str, number: int, kind: int, label: int) -> Any:
    return message.field.add(name=name, number=number, type=kind, label=label)


_aggregated = _make_aggregated_record()
