"""Makes the key ring and the encryption of bodies from the settings.

Functions raise SettingsError if the key file is unusable or has no key for encryption, or if the
library `cryptography` is not installed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from qdo.brokers.registry import kind_of
from qdo.encryption.key_ring import KeyRing
from qdo.encryption.marks import IdMarks, RowOpener
from qdo.errors import SettingsError
from qdo.queues import stream_named
from qdo.settings.settings import Settings
from qdo.text import how_to_install

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault

StreamOf: TypeAlias = Callable[[str], str]


def key_ring_of(settings: Settings) -> KeyRing | None:
    return _key_ring(os.path.abspath(settings.keys)) if settings.keys else None


def vault_of(settings: Settings, app: str, stream_of: StreamOf) -> BodyVault | None:
    """Return the vault that encrypts and decrypts the bodies of an app, or None without keys.

    :param stream_of: `Broker.stream_of`, to call only for queues whose names look like names of
        shards.
    """
    ring = key_ring_of(settings)
    if ring is None:
        return None
    if settings.encrypt:
        ring.in_use("encrypt")
    try:
        from qdo.encryption.bodies import BodyVault
    except ImportError as error:
        raise SettingsError(
            name="keys",
            reason=f"it needs the library cryptography ({error}); {how_to_install('encryption')}",
        ) from error
    return BodyVault(ring, _place(settings, app, stream_of), settings.require_encryption)


def marks_of(settings: Settings, app: str, stream_of: StreamOf) -> IdMarks | None:
    """Return the marks that prove the ids of an app's messages, or None without a signing key."""
    ring = key_ring_of(settings)
    kind = kind_of(settings.broker)
    # Marks are unnecessary if only qdo writes to a broker.
    if ring is None or not ring.has("sign") or not kind.foreign_senders:
        return None
    return IdMarks(ring, _place(settings, app, stream_of))


def opener_of(settings: Settings, app: str, stream_of: StreamOf) -> RowOpener | None:
    """Return the opener of an app's stored messages, or None without keys."""
    vault = vault_of(settings, app, stream_of)
    return None if vault is None else RowOpener(vault, marks_of(settings, app, stream_of))


@functools.cache
def _key_ring(path: str) -> KeyRing:
    """Return the shared key ring of a file. The key ring reads the file again after changes."""
    return KeyRing(path)


def _place(settings: Settings, app: str, stream_of: StreamOf) -> Callable[[str], str]:
    """Return a function that maps a queue to the text that encryption binds its messages to."""
    # Use the stream, not the shard. The shard of a message is unknown at encryption and may be
    # split later. Any app may read a stream of Kinesis.
    stream = kind_of(settings.broker).stream(settings.broker)
    if stream is None:
        return lambda queue: f"{app}\0{stream_of(queue) if stream_named(queue) else queue}"
    bound = f"\0{stream}"
    return lambda queue: bound
