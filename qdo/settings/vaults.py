"""The key ring and the encryption of bodies that the settings ask for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdo.brokers.registry import has_foreign_senders, stream_of
from qdo.encryption.key_ring import KeyRing
from qdo.encryption.marks import IdMarks, RowOpener
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

    :raises SettingsError: the key file cannot be used, has no key to encrypt, or the library
        `cryptography` is not installed.
    """
    ring = key_ring_of(settings)
    if ring is None:
        return None
    if settings.encrypt:
        ring.in_use("encrypt")
    return _vault(ring, app, stream_of(settings.broker), settings.require_encryption)


def marks_of(settings: Settings, app: str) -> IdMarks | None:
    """Return what proves the ids of an app's messages.

    None without a key to sign, and for a broker that only qdo writes to.

    :raises SettingsError: the key file cannot be used.
    """
    ring = key_ring_of(settings)
    if ring is None or not ring.has("sign") or not has_foreign_senders(settings.broker):
        return None
    return IdMarks(ring, _place(app, stream_of(settings.broker)))


def opener_of(settings: Settings, app: str) -> RowOpener | None:
    """Return what opens the stored messages of an app, None without keys.

    :raises SettingsError: as `vault_of`.
    """
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
            reason=f"it needs the library cryptography ({error}); run "
            "`pip install 'qdo[encryption]'`",
        ) from error
    return BodyVault(ring, _place(app, stream), required)


def _place(app: str, stream: str | None) -> Callable[[str], str]:
    """Return a function that returns what the messages of a queue are bound to.

    The shard that gets a message of Kinesis is not known when it is encrypted, and may be split.
    Any app may read the stream.
    """
    if stream is None:
        return lambda queue: f"{app}\0{queue}"
    bound = f"\0{stream}"
    return lambda queue: bound
