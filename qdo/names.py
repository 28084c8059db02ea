"""Which names a queue, and whatever else becomes a znode, may have."""

from __future__ import annotations

from qdo.errors import QueueNameError

MAX_NAME_LENGTH = 200
"""Characters; short enough that transactions of many queues stay small."""

_RESERVED = {"": "it is empty", ".": "it is a relative path", "..": "it is a relative path"}
_RESERVED["zookeeper"] = "ZooKeeper reserves it"


def name_fault(name: str) -> str | None:
    """Return why `name` cannot be a znode name, None when it can.

    The rules are ZooKeeper's (PathUtils.validatePath), and a limit of length.
    """
    if name in _RESERVED:
        return _RESERVED[name]
    if len(name) > MAX_NAME_LENGTH:
        return f"it has {len(name)} characters"
    for character in name:
        if character == "/":
            return "it holds a '/'"
        if _is_refused(ord(character)):
            return f"it holds the character U+{ord(character):04X}"
    return None


def _is_refused(code: int) -> bool:
    """Whether ZooKeeper refuses a character: control, surrogate, private or special."""
    return (
        code <= 0x1F
        or 0x7F <= code <= 0x9F
        or 0xD800 <= code <= 0xF8FF
        or 0xFFF0 <= code <= 0xFFFF
    )


def check_queue_name(name: str) -> str:
    """Return `name`; raise QueueNameError when no znode can have it."""
    reason = name_fault(name)
    if reason:
        raise QueueNameError(name=name, reason=reason)
    return name
