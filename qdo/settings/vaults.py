"""The key ring and the encryption of bodies that the settings ask for.

Functions raise SettingsError if the key file cannot be used or has no key to encrypt, or if the
library `cryptography` is not installed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdo.brokers.registry import kind_of
from qdo.encryption.key_ring import KeyRing
from qdo.encryption.marks import IdMarks, RowOpener
from qdo.errors import SettingsError
from qdo.queues import stream_of
from qdo.settings.settings import Settings
from qdo.text import how_to_install

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault


def key_ring_of(settings: Settings) -> KeyRing | None:
    return _key_ring(os.path.abspath(settings.keys)) if settings.keys else None


def vault_of(settings: Settings, app: str) -> BodyVault | None:
    """Return the vault that encrypts and decrypts the bodies of an app, None without keys."""
    ring = key_ring_of(settings)
    if ring is None:
        return None
    if settings.encrypt:
        ring.in_use("encrypt")
    stream = kind_of(settings.broker).stream(settings.broker)
    return _vault(ring, app, stream, settings.require_encryption)


def marks_of(settings: Settings, app: str) -> IdMarks | None:
    """Return the marks that prove the ids of an app's messages.

    None without a key to sign, and for a broker that only qdo writes to.
    """
    ring, kind = key_ring_of(settings), kind_of(settings.broker)
    if ring is None or not ring.has("sign") or not kind.foreign_senders:
        return None
    return IdMarks(ring, _place(app, kind.stream(settings.broker)))


def opener_of(settings: Settings, app: str) -> RowOpener | None:
    """Return the opener of an app's stored messages, None without keys."""
    vault = vault_of(settings, app)
    return None if vault is None else RowOpener(vault, marks_of(settings, app))


@functools.cache
def _key_ring(path: str) -> KeyRing:
    """Return one key ring for each file: it reads the file when it changes."""
    return KeyRing(path)


@functools.cache
def _vault(ring: KeyRing, app: str, stream: str | None, required: bool) -> BodyVault:
    try:
        from qdo.encryption.bodies import BodyVault
    except ImportError as error:
        raise SettingsError(
            name="keys",
            reason=f"it needs the library cryptography ({error}); {how_to_install('encryption')}",
        ) from error
    return BodyVault(ring, _place(app, stream), required)


def _place(app: str, stream: str | None) -> Callable[[str], str]:
    """Return a function from a queue to the text that its messages are bound to.

    The shard that gets a message is not known when it is encrypted, and may be split. Any app may
    read a stream of Kinesis.
    """
    if stream is None:
        return lambda queue: f"{app}\0{stream_of(queue)}"
    bound = f"\0{stream}"
    return lambda queue: bound
