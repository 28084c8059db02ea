"""The key ring and the encryption of bodies that the settings ask for."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from qdo.brokers.registry import stream_of
from qdo.encryption.key_ring import KeyRing
from qdo.errors import SettingsError
from qdo.settings.settings import Settings

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault


def key_ring_of(settings: Settings) -> KeyRing | None:
    """Return the key ring of the setting `keys`, None without one.

    :raises SettingsError: the file cannot be used.
    """
    return _key_ring(os.path.abspath(settings.keys)) if settings.keys else None


def vault_of(settings: Settings, app: str) -> BodyVault | None:
    """Return what encrypts and decrypts the bodies of an app, None without keys.

    :raises SettingsError: the key file cannot be used, or has no key to encrypt.
    :raises SettingsError: the library `cryptography` is not installed.
    """
    ring = key_ring_of(settings)
    if ring is None:
        return None
    if settings.encrypt:
        ring.in_use("encrypt")
    stream = stream_of(settings.broker)
    return _vault(ring, app, stream, settings.require_encryption)


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
            reason=f"it needs the library cryptography ({error}); run "
            "`pip install 'qdo[encryption]'`",
        ) from error
    # The shard that gets a message of Kinesis is not known when it is encrypted, and may be split.
    # Any app may read the stream.
    bound = f"\0{stream}"
    return BodyVault(ring, lambda queue: f"{app}\0{queue}" if stream is None else bound, required)
