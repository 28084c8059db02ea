"""JSON that arrives as it was sent, or is rejected."""

from __future__ import annotations

import functools
from typing import Any

import ujson

_dumps = functools.partial(ujson.dumps, ensure_ascii=False, escape_forward_slashes=False)


def strict_json(value: Any) -> bytes:
    """Return the JSON of a value.

    :raises ValueError: JSON cannot hold it, or a part of it would be read as something else.
    """
    try:
        data = _dumps(value, allow_nan=False).encode()
        _check_types(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return data


def _check_types(body: Any) -> None:
    """Raise TypeError for a part that ujson silently converts.

    ujson rounds Decimal to float, turns keys into text, and calls `__json__` and `toDict`.
    """
    waiting = [body]
    for value in waiting:  # grows meanwhile
        if type(value) in _PLAIN:
            continue
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r:.60} is not text")
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        elif not isinstance(value, str | int | float):
            raise TypeError(f"{value!r:.60} is not JSON serializable")


_PLAIN = frozenset({str, int, float, bool, type(None)})
