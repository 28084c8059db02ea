"""Bodies and headers in the form that is stored."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import ujson

from qdo.errors import UsageError
from qdo.headers import CONTENT_TYPE, RAW, RESERVED, is_json

_dumps = functools.partial(ujson.dumps, ensure_ascii=False, escape_forward_slashes=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


decode_strictly = json.JSONDecoder(parse_constant=_refuse_constant).decode
"""The standard library's decoder, not ujson's, which lets "-", 01 and raw tabs pass."""


def encoded(
    queue: str, body: Any, headers: Mapping[str, str] | None
) -> tuple[bytes, str | None]:
    """Return body and headers as they are stored.

    Bytes are stored as they are, with a content type that says so; everything else as JSON.

    :raises UsageError: JSON cannot hold the body, headers are no text, or contradict the body.
    """
    if isinstance(body, bytes | bytearray | memoryview):
        given = _checked(headers) if headers else {}
        return bytes(body), _dumps({CONTENT_TYPE: RAW, **given})
    data = encode_body(queue, body)
    if not headers:
        return data, None
    given = _checked(headers)
    kind = given.get(CONTENT_TYPE)
    if kind is not None and not is_json(kind):
        raise UsageError(
            reason=f"the body for queue {queue!r} is sent as JSON, but its header {CONTENT_TYPE}"
            f" says {kind!r}: leave the header out, or send bytes"
        )
    return data, _dumps(given) if given else None


def encode_body(queue: str, body: Any) -> bytes:
    """Return the JSON of a body.

    :raises UsageError: JSON cannot hold it.
    """
    try:
        return _dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            reason=f"the body for queue {queue!r} cannot be JSON: {error}; "
            "send dicts, lists, text, finite numbers, true, false and None, or bytes"
        ) from error


def _checked(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers with qdo's own left out, so that a job may pass on those it got.

    Those are of the message that had them; the new one has an id of its own.
    """
    plain = dict(headers)
    if not all(isinstance(item, str) for pair in plain.items() for item in pair):
        raise UsageError(reason=f"headers map text to text, not {plain!r}")
    return {
        CONTENT_TYPE if name.lower() == CONTENT_TYPE else name: text
        for name, text in plain.items()
        if not name.startswith(RESERVED)
    }
