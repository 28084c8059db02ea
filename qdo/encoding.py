"""Encodes and decodes bodies and headers as brokers store them, and reads JSON strictly."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import ujson

from qdo.errors import UsageError

# The largest body that brokers store in a file or in memory.
MAX_STORED_BODY_BYTES = 64 * 1024 * 1024
# The largest JSON that a worker decodes by default. Decoding takes at most a quarter of a second.
DEFAULT_BODY_BYTES = 4 * 1024 * 1024
# The Unix time of the last second that Python can write as a date, in the year 9999.
MOST_TIME = 253402300799.0

# Prefix of qdo's own headers. qdo does not store a sender's headers with this prefix.
RESERVED = "qdo-"
# The id of a message whose position has changed since it was sent.
ID = "qdo-id"
# The proof that qdo wrote the id (see `qdo.encryption.marks`).
MARK = "qdo-mark"
# The Unix time at which a message with a later position was sent. The message was delayed or in an
# outbox.
SENT = "qdo-sent"
# The Unix time until which a message was delayed.
DUE = "qdo-due"
# The kind of a message (see `qdo.jobs.kinds`).
KIND = "qdo-kind"
# The number of times that operators have sent a dead letter again.
RETRIED = "qdo-retried"
CONTENT_TYPE = "content-type"
# Content type of bytes for which the sender does not specify a content type.
RAW = "application/octet-stream"

# The start of an encrypted body (see `qdo.encryption.bodies`).
SEALED = b"q1."
_SEALED_FORM = re.compile(rb"q1\.([A-Za-z0-9_-]{1,32})\..{30}", re.DOTALL)
_UNREADABLE = "qdo cannot read it: "
_JSON_STARTS = frozenset(b'{["-0123456789tfnNI \t\r\n')
_PLAIN = frozenset({str, int, float, bool, type(None)})
_dumps = functools.partial(ujson.dumps, ensure_ascii=False, escape_forward_slashes=False)
# Also accepts NaN, Infinity and repeated keys, because other programs send them on purpose.
_decode_foreign = json.JSONDecoder().decode


def strict_json(value: Any) -> bytes:
    """Return the JSON of a value; raise ValueError if a part would not arrive unchanged."""
    try:
        data = _dumps(value, allow_nan=False).encode()
        _check_types(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return data


def _check_types(body: Any) -> None:
    """Raise TypeError if ujson would silently convert a part of the body."""
    # ujson rounds Decimal to float, turns keys into text, and calls `__json__` and `toDict`.
    waiting = [body]
    for value in waiting:  # the loop appends to the list
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


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large: a number with a fraction or exponent is a float")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    distinct = dict(pairs)
    if len(distinct) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {repeated!r} twice, and only one would arrive")
    return distinct


_decode = json.JSONDecoder(
    parse_constant=_reject_constant, parse_float=_finite, object_pairs_hook=_distinct
).decode


def decode_strictly(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError if decoding would change a part."""
    value = _decode(text)  # ujson would accept "-", 01 and raw tabs
    if "\\u" in text:
        try:
            _dumps(value).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{half!r} is half of a surrogate pair, not a character") from error
    return value


def is_deeper(value: Any, most: int) -> bool:
    """Return whether objects and arrays are nested deeper than `most` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(level)


class JsonText(bytes):
    """A body that is already JSON and stays unchanged."""


def encoded(queue: str, body: Any, headers: Mapping[str, str] | None) -> tuple[bytes, str | None]:
    """Return the stored form of a body and its headers.

    Bytes stay unchanged, with a content type that marks them as bytes. All other bodies become
    JSON.

    :raises UsageError: JSON cannot hold the body, or headers are not text or contradict the body.
    """
    if isinstance(body, bytes | bytearray | memoryview):
        if type(body) is not JsonText:
            own = _checked(headers) if headers else {}
            return bytes(body), _dumps({CONTENT_TYPE: RAW, **own})
        data = bytes(body)
    else:
        data = encode_body(queue, body)
    if not headers:
        return data, None
    own = _checked(headers)
    kind = own.get(CONTENT_TYPE)
    if kind is not None and not is_json(kind):
        raise UsageError(
            reason=f"the body for queue {queue!r} is sent as JSON, but its header {CONTENT_TYPE}"
            f" is {kind!r}; omit the header, or send bytes"
        )
    return data, _dumps(own) if own else None


def encode_body(queue: str, body: Any) -> bytes:
    """Return the JSON of a body; raise UsageError if the body would not arrive unchanged."""
    try:
        return strict_json(body)
    except ValueError as error:
        raise UsageError(
            reason=f"the body for queue {queue!r} cannot be JSON: {error}; "
            "send dicts with text as keys, lists, text, finite numbers, True, False and None, or "
            "bytes; for dates and the like, use a dataclass as the body"
        ) from error


def _checked(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers without qdo's own headers. A job may forward the headers of its message."""
    plain = dict(headers)
    if not all(isinstance(item, str) for pair in plain.items() for item in pair):
        raise UsageError(
            reason=f"headers must map text to text, got {plain!r}; convert names and values to str"
        )
    return {
        CONTENT_TYPE if name.lower() == CONTENT_TYPE else name: text
        for name, text in plain.items()
        if not name.startswith(RESERVED)
    }


def is_raw(headers: Mapping[str, str]) -> bool:
    """Return whether the body of a message with these headers is bytes, not JSON."""
    kind = headers.get(CONTENT_TYPE)
    return kind is not None and not is_json(kind)


def is_json(kind: str) -> bool:
    """Return whether a content type means JSON, regardless of its parameters."""
    name = kind.partition(";")[0].strip().lower()
    return name == "application/json" or name.endswith("+json")


def with_body_kind(body: bytes, headers: str | None) -> str | None:
    """Return the stored headers of a message that another program may have sent."""
    # A body that is not JSON is bytes, unless a header states its type. An encrypted body may be
    # JSON or bytes, because its content type is also encrypted.
    if is_json_text(body) or key_id_of(body) is not None:
        return headers
    decoded = parsed(headers)
    if decoded is None or CONTENT_TYPE in decoded:
        return headers
    return _dumps({**decoded, CONTENT_TYPE: RAW})


def key_id_of(body: bytes) -> str | None:
    """Return the id of the key that encrypted a body, or None for an unencrypted body."""
    match = _SEALED_FORM.match(body) if body.startswith(SEALED) else None
    return None if match is None else match[1].decode()


def is_json_text(body: bytes) -> bool:
    """Return whether a body is JSON. For most other bodies, the first byte suffices."""
    if not body or body[0] not in _JSON_STARTS:
        return False
    try:
        try:
            # ujson accepts "-" as 0 and 01 as 1. This decoder takes 1 us longer for a small body.
            _decode_foreign(body.decode())
        except RecursionError:  # the depth of its caller counts, too
            ujson.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def parsed(text: str | None) -> dict[str, str] | None:
    """Return the stored headers of any program as a dict of texts, or None if undecodable."""
    decoded = decoded_headers(text)
    return None if decoded is None else _texts(decoded)


def decoded_headers(text: str | None) -> dict[str, Any] | None:
    """Return the decoded values of stored headers, or None if they cannot be decoded."""
    if text is None:
        return {}
    try:
        decoded = ujson.loads(text)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


def _texts(decoded: dict[str, Any]) -> dict[str, str]:
    """Return headers as UTF-8 texts. A value that is not text becomes JSON."""
    try:
        "".join([*decoded, *decoded.values()]).encode()
        return decoded
    except (TypeError, UnicodeEncodeError):
        return {utf8_text(name): utf8_text(_text_of(value)) for name, value in decoded.items()}


def text_headers(decoded: Mapping[str, Any], written: str) -> str:
    """Return the headers of another program as JSON with text values.

    `written` is the original JSON.
    """
    plain = dict(decoded)
    texts = _texts(plain)
    return written if texts is plain and is_utf8(written) else _dumps(texts)


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except RecursionError:  # the depth of its caller counts, too
        return _dumps(value)


def utf8_text(text: str) -> str:
    """Return a text with escapes for stray surrogates, because UTF-8 cannot encode surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode a text, which then has no stray surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable(reason: str) -> str:
    """Return stored headers for a message that its broker delivers but qdo cannot read."""
    # No worker can decode headers whose JSON is a text. Therefore the message's policy ends the
    # message at once with this reason, and other messages continue.
    return json.dumps(_UNREADABLE + reason)


def undecodable_headers(text: str | None) -> str:
    """Return headers that are not a JSON object, in a form that no worker decodes."""
    written = text or ""
    try:
        decoded = ujson.loads(written)
    except (ValueError, RecursionError):
        return written
    if decoded:
        return written
    # A worker would treat `null` and `0` as the headers of a message without headers.
    return unreadable(f"its headers must be a JSON object, got {written:.100}")


def unreadable_reason(headers: str | None) -> str | None:
    """Return the reason in headers that `unreadable` made; None for other headers."""
    try:
        decoded = None if headers is None else json.loads(headers)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, str) and decoded.startswith(_UNREADABLE) else None


# Headers of a message whose body the worker has not read.
LEFT_ON_SERVER = unreadable("its body exceeds max_body_bytes")


def stored_time(headers: Mapping[str, str], name: str) -> float | None:
    """Return the Unix time in one of qdo's headers, or None for a missing or invalid header."""
    try:
        seconds = float(headers[name])
    except (KeyError, TypeError, ValueError):
        return None
    # Other programs may write any number, and date formatting fails for some numbers.
    return seconds if 0 <= seconds <= MOST_TIME else None


def with_header(text: str | None, **changed: str | None) -> str | None:
    """Return stored headers with changes. Undecodable text stays unchanged.

    :param changed: values by name, with `_` instead of `-`; None removes a header.
    """
    decoded = parsed(text)
    if decoded is None:
        return text
    new = {name.replace("_", "-"): value for name, value in changed.items()}
    return _dumps({name: value for name, value in {**decoded, **new}.items() if value is not None})


def with_missing(text: str | None, headers: Mapping[str, str]) -> str | None:
    """Add missing `headers` to stored headers. Undecodable text stays unchanged."""
    decoded = parsed(text)
    return text if decoded is None else _dumps({**headers, **decoded})
