"""Access control lists as ZooKeeper checks them, for the embedded coordinator."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable

from kazoo.exceptions import AuthFailedError, InvalidACLError, NoAuthError
from kazoo.security import ACL as Entry
from kazoo.security import OPEN_ACL_UNSAFE, Permissions
from kazoo.security import Id as Identity

LOCAL = Identity("ip", "127.0.0.1")
"""The identity of every connection without authentication."""


def authenticate(scheme: str, credential: str) -> Identity:
    """Return the identity that a credential proves; raise AuthFailedError for an unknown scheme.

    As with ZooKeeper a digest proves itself: a client that knows "user:password" is that user.
    """
    if scheme != "digest" or ":" not in credential:
        raise AuthFailedError
    user = credential.split(":", 1)[0]
    # The format of ZooKeeper, which requires SHA-1.
    digest = hashlib.sha1(credential.encode(), usedforsecurity=False).digest()
    return Identity("digest", f"{user}:{base64.b64encode(digest).decode()}")


def normalise(acl: Iterable[Entry] | None, identities: tuple[Identity, ...]) -> str | None:
    """Return a list as it is stored: checked, without duplicates; None if open to all.

    :raises InvalidACLError: it is empty or has an invalid entry.
    """
    if acl is OPEN_ACL_UNSAFE:
        return None
    entries: list[list[int | str]] = []
    for perms, identity in acl or ():
        for scheme, name in _expand(identity, identities):
            if [perms, scheme, name] not in entries:
                entries.append([perms, scheme, name])
    if not entries:
        raise InvalidACLError
    if entries == [[Permissions.ALL, "world", "anyone"]]:
        return None
    return json.dumps(entries)


def _expand(identity: Identity, identities: tuple[Identity, ...]) -> list[Identity]:
    if identity.scheme == "auth":
        known = [each for each in identities if each.scheme == "digest"]
        if not known:
            raise InvalidACLError
        return known
    valid = {
        "world": identity.id == "anyone",
        "digest": identity.id.count(":") == 1,
        "ip": bool(identity.id),
    }
    if not valid.get(identity.scheme, False):
        raise InvalidACLError
    return [identity]


@functools.lru_cache(maxsize=1024)
def _parse(stored: str) -> tuple[Entry, ...]:
    return tuple(Entry(perms, Identity(scheme, name)) for perms, scheme, name in json.loads(stored))


def allows(stored: str | None, permission: int, identities: tuple[Identity, ...]) -> bool:
    """Return whether one of `identities` has any right of `permission`."""
    if stored is None:
        return True
    return any(
        entry.perms & permission
        and (entry.id == Identity("world", "anyone") or entry.id in identities)
        for entry in _parse(stored)
    )


def check(stored: str | None, permission: int, identities: tuple[Identity, ...]) -> None:
    """Raise NoAuthError unless `allows`."""
    if not allows(stored, permission, identities):
        raise NoAuthError


def shown(stored: str | None, identities: tuple[Identity, ...]) -> list[Entry]:
    """Return a list as shown to a client: digests are masked unless it may change the list."""
    if stored is None:
        return list(OPEN_ACL_UNSAFE)
    entries = list(_parse(stored))
    if allows(stored, Permissions.ADMIN, identities):
        return entries
    return [
        Entry(entry.perms, Identity(entry.id.scheme, entry.id.id.split(":")[0] + ":x"))
        if entry.id.scheme == "digest"
        else entry
        for entry in entries
    ]
