"""Converts bodies to JSON text for programs and people outside of qdo."""

from __future__ import annotations

import functools
from typing import Any

import ujson

from qdo import DeadLetter

_dumps = functools.partial(ujson.dumps, escape_forward_slashes=False, allow_nan=False)


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON in UTF-8.

    Half of a surrogate pair, which UTF-8 cannot encode, stays escaped as its sender wrote it.

    :raises DeadLetter: JSON cannot hold the value, and no retry can help. For example, other
        programs can send 1e400, which becomes infinite.
    """
    try:
        try:
            return _dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return _dumps(value, ensure_ascii=True).encode()
    except (OverflowError, ValueError) as error:
        raise DeadLetter(f"the body cannot be delivered as JSON: {error}") from error
