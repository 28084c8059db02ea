"""Messages on their way to a broker: checked, and in the form that is stored."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import ujson

from qdo.brokers.base import Outgoing
from qdo.errors import UsageError
from qdo.names import check_queue_name


def outgoing(
    queue: str, body: Any, key: str | None = None, headers: Mapping[str, str] | None = None
) -> Outgoing:
    """Return a checked message in the form brokers take; see `App.send`."""
    _check_queue(queue)
    if key is not None and not isinstance(key, str):
        raise UsageError(reason=f"the key of a message is text, not {key!r}")
    return Outgoing(
        queue, encode_body(queue, body), key, encode_headers(headers) if headers else None
    )


_dumps = functools.partial(ujson.dumps, ensure_ascii=False, escape_forward_slashes=False)


@functools.lru_cache(maxsize=4096)
def _check_queue(queue: str) -> str:
    return check_queue_name(queue)


def encode_body(queue: str, body: Any) -> bytes:
    """Return the JSON of a body.

    :raises UsageError: JSON cannot hold it.
    """
    try:
        return _dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            reason=f"the body for queue {queue!r} cannot be JSON: {error}; "
            "send dicts, lists, text, finite numbers, true, false and None"
        ) from error


def encode_headers(headers: Mapping[str, str]) -> str:
    """Return the JSON of headers; raise UsageError unless they map text to text."""
    plain = dict(headers)
    if not all(isinstance(item, str) for pair in plain.items() for item in pair):
        raise UsageError(reason=f"headers map text to text, not {plain!r}")
    return _dumps(plain)
