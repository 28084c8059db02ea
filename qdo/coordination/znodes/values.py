"""Encode and parse the values of nodes, and limit their sizes."""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import ujson

from qdo.encoding import is_deeper

# The largest value that qdo sends. ZooKeeper drops the connection after an oversize request.
MAX_VALUE_BYTES = 512 * 1024
MAX_TRANSACTION_BYTES = 768 * 1024
# The largest value of a queue node, which fits into a transaction together with any worker node.
MAX_QUEUE_BYTES = 240 * 1024
# The deepest nesting of a value. ujson writes at most 1,024 levels, but some versions of Python's
# own parser read more.
MAX_DEPTH = 100
# The largest value after decompression: over 200,000 queues with 32-character names.
MAX_INFLATED_BYTES = 8 * 1024 * 1024
# The maximum number of strings in a list over `MAX_VALUE_BYTES`, which take half a second to parse.
MAX_LISTED = 300_000
# The maximum size of a list over `MAX_VALUE_BYTES`, without strings and commas, in bytes.
MAX_STRUCTURE_BYTES = 1024
# The first byte of a compressed value. No JSON text begins with this byte.
_ZLIB = b"x"
# The maximum number of characters of a foreign value in a fault's reason.
SHOWN_CHARACTERS = 60
# The largest Unix time, in the year 5138. Only another program writes a larger time.
MAX_TIME = 1e11
# The largest integer up to which every integer has an exact float.
MAX_EXACT = 2**53
_Value = TypeVar("_Value", str, int, float)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def load(data: bytes | None) -> tuple[dict[str, Any], str | None]:
    """Return the JSON object of a node, and the reason if the node is unreadable.

    Every reader of a node's value uses this function. `encode` can write any returned value.
    """
    if data is None or not data.strip():
        return {}, None  # `zkCli.sh create PATH` makes such a node
    try:
        value = _DECODER.decode(data.decode())
        if not isinstance(value, dict):
            raise ValueError("not an object")
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
            raise ValueError("nested too deeply")
        if _MAYBE_SURROGATE.search(data):  # no output can encode lone surrogates
            text = json.dumps(value, ensure_ascii=False)
            value = _DECODER.decode(_SURROGATE.sub("\ufffd", text))
    except (ValueError, RecursionError):
        return {}, f"the value must be a JSON object, got {data[:SHOWN_CHARACTERS]!r}"
    return value, None


def _reject(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is not a number of JSON programs")
    return number


# Make the decoder once, because `json.loads` with options makes one for each call, in twice the
# time.
_DECODER = json.JSONDecoder(parse_constant=_reject, parse_float=_finite)


def unix_time(value: Any) -> float | None:
    """Return a value as a Unix time; None if it is not one."""
    is_time = type(value) in (int, float) and 0 <= value < MAX_TIME
    return float(value) if is_time else None


def text_of(value: Any, most: int | None = None) -> str:
    """Return a string, shortened to `most` characters; "" for any other value."""
    return value[:most] if isinstance(value, str) else ""


def typed(value: Any, kind: type[_Value]) -> _Value | None:
    """Return a value if it has exactly this type, else None; JSON may write a float as an int."""
    if kind is float and type(value) is int and abs(value) < MAX_EXACT:
        value = float(value)
    return value if type(value) is kind else None


def shown(value: Any) -> str:
    """Return the text of a foreign value for a fault's reason, shortened."""
    return repr(value)[:SHOWN_CHARACTERS]


def encode(value: dict[str, Any]) -> bytes:
    """Return the JSON of a node; U+FFFD replaces lone surrogates, which UTF-8 cannot encode."""
    text = ujson.dumps(value, ensure_ascii=False, escape_forward_slashes=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text).encode()


def encode_with_others(value: dict[str, Any], others: Mapping[str, Any]) -> bytes:
    """Return the JSON of a node with other programs' keys; omit these keys if it is too long."""
    data = encode({**others, **value})
    # A rewrite may lengthen a value, for example from 1e15 to 1000000000000000.0.
    return data if len(data) <= MAX_VALUE_BYTES else encode(value)


def encode_list(value: dict[str, Any]) -> bytes:
    """Return the JSON of a node that lists queues; compress it if it is too long."""
    # Level 1 compresses 50,000 names like tenant-00001234 to 126 KB in 13 ms, and 50,000 UUIDs to
    # 1.1 MB in 62 ms. Level 6 saves less than 5 % but takes twice the time. 512 KiB can contain
    # 207,000 such names or 23,000 UUIDs.
    data = encode(value)
    long = MAX_VALUE_BYTES < len(data) <= MAX_INFLATED_BYTES
    return zlib.compress(data, 1) if long and is_flat(data) else data


def load_list(data: bytes | None) -> tuple[dict[str, Any], str | None]:
    """Load a node like `load`; decompress a value from `encode_list`."""
    if data is None:
        return load(data)
    value = inflated(data)
    if len(value) > MAX_VALUE_BYTES and not is_flat(value):
        return {}, f"a long value must be a list of names, got {value[:SHOWN_CHARACTERS]!r}"
    return load(value)


def is_flat(data: bytes) -> bool:
    """Return whether a value consists of strings, in a limited number, and little else."""
    # 8 MiB of empty lists compress to 8 KB in a node, but parsing them takes 4 s and 400 MB. The
    # process could do no other work in this time, so its lease would expire.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * (MAX_LISTED + MAX_STRUCTURE_BYTES):
        return False  # splitting 8 MiB of short names takes 0.25 s and 185 MB
    outside = b"".join(unescaped.split(b'"')[::2])
    count = outside.count(b",")
    return count <= MAX_LISTED and len(outside) - count <= MAX_STRUCTURE_BYTES


def inflated(data: bytes) -> bytes:
    """Return a decompressed value; leave a truncated or too large value unchanged."""
    inflate = zlib.decompressobj()
    try:
        value = inflate.decompress(data, MAX_INFLATED_BYTES) if data.startswith(_ZLIB) else data
    except zlib.error:
        return data
    return value if inflate.eof else data


def string_tuple(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    # Keep one string object for each name, because several nodes contain the same name.
    return tuple(sys.intern(item) for item in value if isinstance(item, str))
