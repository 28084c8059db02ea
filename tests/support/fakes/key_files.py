"""Key files for tests."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from qdo.encryption.key_ring import KEY_BYTES, Key, Purpose, change_keys


def key(id: str, purpose: Purpose = "encrypt") -> Key:
    """Return a key whose bytes follow from its id."""
    return Key(id, purpose, id.encode().ljust(KEY_BYTES, b"."))


def write_keys(path: Path, *keys: Key) -> str:
    """Write a key file; return its path."""
    change_keys(str(path), lambda before: keys)
    return str(path)


def line(key: Key) -> str:
    """Return the line of a key."""
    return f"{key.id} {key.purpose} {base64.b64encode(key.secret).decode()}"


def write_text(path: Path, text: str, mode: int = 0o600) -> str:
    """Write any text as a key file; return its path."""
    path.write_text(text)
    os.chmod(path, mode)
    return str(path)
