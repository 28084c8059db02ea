"""Encoding and parsing of node values, and their size limits."""

from __future__ import annotations

import json
import sys
from typing import Any

import ujson

MAX_VALUE_BYTES = 512 * 1024
"""Largest value sent: ZooKeeper answers an oversize request by dropping the connection."""


MAX_TRANSACTION_BYTES = 768 * 1024


def load(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a node, None if the data is anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def encode(value: dict[str, Any]) -> bytes:
    """Return the JSON of a node."""
    return ujson.dumps(value, ensure_ascii=True, escape_forward_slashes=False).encode()


def string_tuple(value: Any) -> tuple[str, ...]:
    """Return the strings of a JSON list; other items are left out."""
    if not isinstance(value, list):
        return ()
    # One object for each name: it occurs in several nodes, and a worker keeps all of them.
    return tuple(sys.intern(item) for item in value if isinstance(item, str))
