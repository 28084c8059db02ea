"""Which names a queue, and whatever else becomes a znode, may have."""

from __future__ import annotations

import re

from qdo.errors import QueueNameError

MAX_NAME_LENGTH = 200
"""Characters; short enough that transactions of many queues stay small."""

_RESERVED = {"": "it is empty", ".": "it is a relative path", "..": "it is a relative path"}
_RESERVED["zookeeper"] = "ZooKeeper reserves it"
_REFUSED = re.compile("[/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff]")
"""What ZooKeeper refuses: control, surrogate, private and special characters. To its Java, a
character beyond U+FFFF, such as an emoji, is two surrogates."""


def name_fault(name: str) -> str | None:
    """Return why `name` cannot be a znode name, None when it can.

    The rules are ZooKeeper's (PathUtils.validatePath), and a limit of length.
    """
    if name in _RESERVED:
        return _RESERVED[name]
    if len(name) > MAX_NAME_LENGTH:
        return f"it has {len(name)} characters"
    refused = _REFUSED.search(name)
    if refused is None:
        return None
    if refused[0] == "/":
        return "it holds a '/'"
    return f"it holds the character U+{ord(refused[0]):04X}"


def is_path_part(name: str) -> bool:
    """Return whether a name that was read somewhere can be put into a path, however long."""
    return name not in _RESERVED and _REFUSED.search(name) is None


def check_queue_name(name: str) -> str:
    """Return `name`; raise QueueNameError when no znode can have it."""
    reason = name_fault(name)
    if reason:
        raise QueueNameError(name=name, reason=reason)
    return name
