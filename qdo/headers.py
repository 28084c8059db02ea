"""Headers that qdo itself gives a meaning, and what they say about a message."""

from __future__ import annotations

from collections.abc import Mapping

import ujson

RESERVED = "qdo-"
"""How the names of qdo's own headers begin; those of a sender are left out on sending."""
ID = "qdo-id"
"""Id of a message that was stored under another position than the one it has now."""
RETRIED = "qdo-retried"
"""How often a message was sent again after it was a dead letter."""
CONTENT_TYPE = "content-type"
RAW = "application/octet-stream"
"""Content type of bytes whose sender does not say another."""


def is_raw(headers: Mapping[str, str]) -> bool:
    """Return whether the body of a message with these headers is bytes, not JSON."""
    kind = headers.get(CONTENT_TYPE)
    return kind is not None and not is_json(kind)


def is_json(kind: str) -> bool:
    """Return whether a content type says JSON, whatever its parameters."""
    name = kind.partition(";")[0].strip().lower()
    return name == "application/json" or name.endswith("+json")


def parsed(text: str | None) -> dict[str, str] | None:
    """Return stored headers as a dict, None where they cannot be decoded."""
    if text is None:
        return {}
    try:
        found = ujson.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def with_header(text: str | None, **added: str) -> str | None:
    """Return stored headers with more of them; what cannot be decoded is left as it is.

    :param added: by name, with `_` for `-`.
    """
    found = parsed(text)
    if found is None:
        return text
    found.update((name.replace("_", "-"), value) for name, value in added.items())
    return ujson.dumps(found, ensure_ascii=False, escape_forward_slashes=False)
