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

# Largest value sent: ZooKeeper answers an oversize request by dropping the connection.
MAX_VALUE_BYTES = 512 * 1024
MAX_TRANSACTION_BYTES = 768 * 1024
# Largest value of a queue node: it fits into a transaction beside any worker node.
MAX_QUEUE_BYTES = 240 * 1024
# Deepest nesting of a value. ujson cannot write more than 1,024 levels, and Python's own parser
# reads more in some versions.
MAX_DEPTH = 100
# Largest value after decompression: over 200,000 queues with 32-character names.
MAX_INFLATED_BYTES = 8 * 1024 * 1024
# Strings in a list that is longer than `MAX_VALUE_BYTES`; parsing so many takes half a second.
MAX_LISTED = 300_000
# Everything but strings and commas in such a list.
MAX_STRUCTURE_BYTES = 1024
# First byte of a compressed value. No JSON text begins with it.
_ZLIB = b"x"
# Length of a foreign value in the reason of a fault.
SHOWN_CHARACTERS = 60
# A larger Unix time, in the year 5138, was written by another program.
MAX_TIME = 1e11
# Larger whole numbers have no exact float.
MAX_EXACT = 2**53
_Value = TypeVar("_Value", str, int, float)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def load(data: bytes | None) -> tuple[dict[str, Any], str | None]:
    """Return the JSON object of a node, and why it cannot be read, if it cannot.

    Every value of a node is read here. `encode` can write whatever this returns.
    """
    if data is None or not data.strip():
        return {}, None  # as `zkCli.sh create PATH` leaves it
    try:
        value = _DECODER.decode(data.decode())
        if not isinstance(value, dict):
            raise ValueError("not an object")
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
            raise ValueError("nested too deeply")
        if _MAYBE_SURROGATE.search(data):  # no output can encode lone ones
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


# Made once: `json.loads` makes one for each call with options, which takes as long as the call.
_DECODER = json.JSONDecoder(parse_constant=_reject, parse_float=_finite)


def unix_time(value: Any) -> float | None:
    """Return a Unix time; None for any other value, and for an integer that no float can hold."""
    is_time = type(value) in (int, float) and 0 <= value < MAX_TIME
    return float(value) if is_time else None


def text_of(value: Any, most: int | None = None) -> str:
    """Return a text, cut to a length; "" for any other value."""
    return value[:most] if isinstance(value, str) else ""


def typed(value: Any, kind: type[_Value]) -> _Value | None:
    """Return a value of exactly this type, None for any other: JSON may write a float as an int."""
    if kind is float and type(value) is int and abs(value) < MAX_EXACT:
        value = float(value)
    return value if type(value) is kind else None


def shown(value: Any) -> str:
    """Return a foreign value for the reason of a fault, cut to a readable length."""
    return repr(value)[:SHOWN_CHARACTERS]


def encode(value: dict[str, Any]) -> bytes:
    """Return the JSON of a node; lone surrogates, which UTF-8 cannot encode, become U+FFFD."""
    text = ujson.dumps(value, ensure_ascii=False, escape_forward_slashes=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text).encode()


def encode_with_others(value: dict[str, Any], others: Mapping[str, Any]) -> bytes:
    """Return the JSON of a node with the keys of other programs, without them if it is too long."""
    data = encode({**others, **value})
    # A value that is written again may grow: 1e15 becomes 1000000000000000.0.
    return data if len(data) <= MAX_VALUE_BYTES else encode(value)


def encode_list(value: dict[str, Any]) -> bytes:
    """Return the JSON of a node that lists queues, compressed if it is too long otherwise."""
    # Level 1: it makes 126 KB of 50,000 names like tenant-00001234 in 13 ms, and 1.1 MB of as many
    # UUIDs in 62 ms. Level 6 saves less than 5 % for twice the time. 512 KiB hold 207,000 such
    # names, or 23,000 UUIDs.
    data = encode(value)
    long = MAX_VALUE_BYTES < len(data) <= MAX_INFLATED_BYTES
    return zlib.compress(data, 1) if long and is_flat(data) else data


def load_list(data: bytes | None) -> tuple[dict[str, Any], str | None]:
    """Do the same as `load` for a node that `encode_list` may have made."""
    if data is None:
        return load(data)
    value = inflated(data)
    if len(value) > MAX_VALUE_BYTES and not is_flat(value):
        return {}, f"a long value must be a list of names, got {value[:SHOWN_CHARACTERS]!r}"
    return load(value)


def is_flat(data: bytes) -> bool:
    """Return whether a value has little but strings, and not too many."""
    # 8 MiB of empty lists, which are 8 KB in a node, take 4 s and 400 MB to parse. Nothing else
    # happens in that time, and the lease of the process runs out.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * (MAX_LISTED + MAX_STRUCTURE_BYTES):
        return False  # to split 8 MiB of short names would take 0.25 s and 185 MB
    outside = b"".join(unescaped.split(b'"')[::2])
    count = outside.count(b",")
    return count <= MAX_LISTED and len(outside) - count <= MAX_STRUCTURE_BYTES


def inflated(data: bytes) -> bytes:
    """Return a value without its compression; one that is cut off or too large is unchanged."""
    inflate = zlib.decompressobj()
    try:
        value = inflate.decompress(data, MAX_INFLATED_BYTES) if data.startswith(_ZLIB) else data
    except zlib.error:
        return data
    return value if inflate.eof else data


def string_tuple(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    # Keep one object for each name: it occurs in several nodes, and a worker keeps all of them.
    return tuple(sys.intern(item) for item in value if isinstance(item, str))
