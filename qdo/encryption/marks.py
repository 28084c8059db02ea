"""Marks that prove the id of a message: HMAC-SHA256 with the keys to sign.

A retried dead letter and a message from an outbox have their id in a header. Brokers over the
network have other senders, too, which could choose the id of another message, so that a worker
takes that one for done. With a key to sign, a worker accepts an id only with its mark. The mark
covers the place of the message, as that of an encrypted body, its id, and its body as it is stored.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping

from qdo.encoding import ID, MARK, parsed, with_header
from qdo.encryption.key_ring import Key, KeyRing

_CONTEXT = b"qdo id\0"


class IdMarks:
    """Makes and checks marks. Safe to use from several threads.

    :param place: what the marks of a queue are bound to.
    """

    def __init__(self, ring: KeyRing, place: Callable[[str], str]) -> None:
        self._ring = ring
        self._place = place

    def marked(self, queue: str, headers: str | None, body: bytes) -> str | None:
        """Return headers with the mark of their id; unchanged without an id.

        :raises SettingsError: no key signs.
        """
        id = (parsed(headers) or {}).get(ID)
        if not isinstance(id, str):
            return headers
        key = self._ring.in_use("sign")
        return with_header(headers, qdo_mark=f"{key.id}.{self._digest(key, queue, id, body)}")

    def proven(self, queue: str, headers: str | None, body: bytes) -> str | None:
        """Return headers without an id that has no valid mark."""
        if headers is None or ID not in headers:
            return headers
        found = parsed(headers)
        if not found or ID not in found or self._is_valid(queue, found, body):
            return headers
        return with_header(headers, qdo_id=None, qdo_mark=None)

    def _is_valid(self, queue: str, found: Mapping[str, object], body: bytes) -> bool:
        id, mark = found[ID], found.get(MARK)
        if not isinstance(id, str) or not isinstance(mark, str):
            return False
        name, _, digest = mark.partition(".")
        key = self._ring.find("sign", name)
        if key is None or not digest.isascii():
            return False
        return hmac.compare_digest(self._digest(key, queue, id, body), digest)

    def _digest(self, key: Key, queue: str, id: str, body: bytes) -> str:
        place = self._place(queue).encode("utf-8", "surrogatepass")
        parts = (place, id.encode("utf-8", "surrogatepass"), body)
        digests = (hashlib.sha256(part).digest() for part in parts)
        return hmac.new(key.secret, _CONTEXT + b"".join(digests), hashlib.sha256).hexdigest()
