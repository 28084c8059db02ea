"""Encrypt and decrypt bodies by AES-256-GCM with the keys of the key ring.

=====================  ==================================================================
part of a body         content
=====================  ==================================================================
``q1.``                this form
key id, ``.``          which key decrypts it
12 bytes               random nonce
the rest               ciphertext of the content type of bytes (2 bytes of length, text;
                       none for JSON) and the body, and a tag of 16 bytes
=====================  ==================================================================

The tag also covers the place of the body: app and queue, or the stream of Kinesis. So no process
can decrypt the body in another queue or for another app. The tag does not cover the message's id,
because brokers choose the id after the encryption of the body.

JSON never begins with ``q``, and the ciphertext contains the content type of bytes. So no plaintext
body looks like an encrypted body.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from qdo.encoding import CONTENT_TYPE, SEALED, is_raw, key_id_of, parsed, with_header
from qdo.encryption.key_ring import Key, KeyRing
from qdo.errors import BodyAuthenticationError, ClearBodyError, KeyMissingError

NONCE_BYTES = 12
_LENGTH_BYTES = 2
_CONTEXT = b"qdo body\0"


class BodyVault:
    """Encrypts and decrypts the bodies of one app. This class is thread-safe.

    :param place: returns the place to which the vault binds the bodies of a queue.
    :param required: whether to refuse plaintext bodies.
    """

    def __init__(self, ring: KeyRing, place: Callable[[str], str], required: bool = False) -> None:
        self._ring = ring
        self._place = place
        self._required = required

    def seal(self, queue: str, body: bytes, headers: str | None) -> tuple[bytes, str | None]:
        """Return an encrypted body, and its headers without the content type of bytes."""
        kind = b""
        found = parsed(headers) if headers else None
        if found and is_raw(found):
            kind = found[CONTENT_TYPE].encode("utf-8", "surrogatepass")
            headers = with_header(headers, content_type=None) if len(found) > 1 else None
        key = self._ring.in_use("encrypt")
        nonce = os.urandom(NONCE_BYTES)
        plain = b"".join((len(kind).to_bytes(_LENGTH_BYTES, "big"), kind, body))
        sealed = _cipher(key).encrypt(nonce, plain, self._bound(queue))
        return b"".join((SEALED, key.id.encode(), b".", nonce, sealed)), headers

    def open(self, queue: str, body: bytes, headers: str | None) -> tuple[bytes, str | None]:
        """Return a decrypted body with its headers; leave a plaintext body unchanged.

        :raises KeyMissingError: the key ring does not have the body's key.
        :raises BodyAuthenticationError: the body is corrupt, or belongs to another queue or app.
        :raises ClearBodyError: the body is plaintext, and `required` is set.
        """
        id = key_id_of(body)
        if id is None or (headers is not None and is_raw(parsed(headers) or {})):
            if self._required:
                raise ClearBodyError(queue=queue)
            return body, headers
        key = self._ring.find("encrypt", id)
        if key is None:
            raise KeyMissingError(queue=queue, key=id, place=self._ring.path)
        start = len(SEALED) + len(id) + 1 + NONCE_BYTES
        nonce = body[start - NONCE_BYTES : start]
        try:
            plain = _cipher(key).decrypt(nonce, body[start:], self._bound(queue))
        except (InvalidTag, ValueError) as error:
            raise BodyAuthenticationError(queue=queue, key=id) from error
        end = _LENGTH_BYTES + int.from_bytes(plain[:_LENGTH_BYTES], "big")
        if end > _LENGTH_BYTES:
            kind = plain[_LENGTH_BYTES:end].decode("utf-8", "surrogatepass")
            headers = with_header(headers, content_type=kind)
        return plain[end:], headers

    def _bound(self, queue: str) -> bytes:
        return _CONTEXT + self._place(queue).encode("utf-8", "surrogatepass")


@functools.lru_cache(64)  # making a cipher takes 8 us, and senders make a vault for each call
def _cipher(key: Key) -> AESGCM:
    return AESGCM(key.secret)
