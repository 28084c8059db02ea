"""Messages that the Kinesis Producer Library packed into one record.

The format is published in awslabs/amazon-kinesis-producer, aggregation-format.md: four magic
bytes, a Protocol Buffers message, and its MD5 digest. Google's `protobuf` parses it. The Python
module of AWS, aws-kinesis-agg, changes `sys.path` on import, had its last release in 2022, and
keeps messages that belong to other shards. The tests read records that it packed.

Such misplaced messages appear after a reshard. The producer packs messages by the shards it knows.
When a record goes to another shard, it sends again the messages in it whose hash key belongs to a
different shard. Like KCL, this module drops the misplaced copies.

Everybody who may write to the stream can write such a record, so its content is checked against
the limits of Kinesis before anything is made of it. 100,000 messages take half a second and more,
in which the other queues of the process go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from qdo.brokers.kinesis.codec import MAX_KEY
from qdo.errors import SettingsError
from qdo.system.pacing import paced

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise SettingsError(
        name="broker", reason="kinesis:// needs protobuf: pip install 'qdo[aws]'"
    ) from error

_MAGIC = b"\xf3\x89\x9a\xc2"
_DIGEST_BYTES = 16
_MAX_HASH_DIGITS = 39

MAX_MESSAGES = 100_000
"""Messages in one record. A record of 1 MiB has room for 170,000 without a body, which nobody
sends: as messages of a worker they would take 60 MB."""

_T = TypeVar("_T")
_Field = descriptor_pb2.FieldDescriptorProto
_STRINGS = (_Field.TYPE_STRING, _Field.LABEL_REPEATED)


class Unpacked(NamedTuple):
    """One message of an aggregated record."""

    subsequence: int
    partition_key: str
    data: bytes


def is_aggregated(data: bytes) -> bool:
    """Return whether a record begins like an aggregated record."""
    return data.startswith(_MAGIC)


def unpack(data: bytes, hash_keys: tuple[int, int] | None) -> list[Unpacked] | None:
    """Return the messages of an aggregated record, None if the record is an ordinary one.

    :param hash_keys: first and last hash key of the shard; messages with other hash keys are
        dropped. None keeps all messages.
    :raises ValueError: the digest is right, but no producer library packs such a record.
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
    # Each access to a table makes a new string: 68,000 messages once made 34 GB of one key.
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
    if not isinstance(text, str):  # protobuf returns bytes instead
        raise ValueError("a partition key is not UTF-8")
    if len(text) > MAX_KEY:
        raise ValueError(f"a partition key has {len(text)} characters, more than {MAX_KEY}")
    return text


def _checked_hash(text: Any) -> int | None:
    """Return the number in a text, None if there is none: the partition key then decides."""
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
    """Return the class of the outer message, built from a descriptor in code."""
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
