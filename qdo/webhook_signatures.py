"""Makes qdo's signatures of webhooks, and verifies the signatures of senders.

A sender signs the body. Some senders also sign an id and a time before the body. qdo compares
signatures in constant time, so response times do not help to guess signatures.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

# Maximum difference between the time of a signature and the local clock.
TOLERANCE_SECONDS = 300.0
SECRET_PREFIX = "whsec_"  # noqa: S105 - only the prefix
SECRET_BYTES = range(16, 129)
_is_time = re.compile("[0-9]{1,12}").fullmatch

# Headers of a request, with names in lower case.
Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SignatureScheme:
    """The way in which a sender signs.

    :ivar given: a function that returns the signatures of a request, and the signed parts before
        the body. A dot follows each part. The last part is a time.
    :ivar signature: a function that returns the signature of bytes, in the form that requests
        contain.
    :ivar identity: a function that returns the signed bytes that are the same in every attempt to
        send a verified webhook, or None if a repeated webhook looks like a new webhook.
    :ivar passed_on: headers that describe a webhook. Most schemes do not sign them.
    :ivar key: a function that returns the key of a secret, or raises ValueError for an invalid
        secret.
    """

    given: Callable[[Headers], tuple[Sequence[str], Sequence[str]]]
    signature: Callable[[bytes, bytes], bytes]
    identity: Callable[[Headers, bytes], bytes | None]
    passed_on: tuple[str, ...] = ()
    key: Callable[[str], bytes] = str.encode

    def may_verify(self, headers: Headers, now: float) -> bool:
        """Return whether the signature in headers is from about this Unix time. Ignore the body."""
        texts, parts = self.given(headers)
        if not any(texts) or any("." in part for part in parts):
            return False
        return not parts or _is_about(parts[-1], now)

    def verifies(self, keys: Iterable[bytes], headers: Headers, body: bytes, now: float) -> bool:
        """Return whether one of the keys has signed a request at about this Unix time."""
        if not self.may_verify(headers, now):
            return False
        texts, parts = self.given(headers)
        # If the id contained a dot, an attacker could move its end and the time into the body.
        begin = body[:13].partition(b".")
        if len(parts) > 1 and begin[1] and _is_about(begin[0].decode("latin-1"), now):
            return False
        signed = b"".join(_raw(f"{part}.") for part in parts) + body
        wanted = [self.signature(key, signed) for key in keys]
        return any(hmac.compare_digest(each, _raw(text)) for text in texts for each in wanted)


def _is_about(text: str, now: float) -> bool:
    return bool(_is_time(text)) and abs(int(text) - now) <= TOLERANCE_SECONDS


def _raw(text: str) -> bytes:
    """Return the bytes of a header, which WSGI decodes as Latin-1."""
    return text.encode("latin-1", "replace")


def _hex(key: bytes, signed: bytes) -> bytes:
    return hmac.new(key, signed, hashlib.sha256).hexdigest().encode()


def _standard(headers: Headers, part: str) -> str:
    """Return a header of Standard Webhooks, under its own name or the name that Svix uses."""
    brand = "webhook" if "webhook-id" in headers else "svix"
    return headers.get(f"{brand}-{part}", "")


def standard_key(secret: str) -> bytes:
    """Return the key of a Standard Webhooks secret; raise ValueError for an invalid secret."""
    named = secret.removeprefix("v1,")  # some senders include the signature version
    text = named.removeprefix(SECRET_PREFIX)
    with suppress(ValueError):
        key = base64.b64decode(text, validate=True)
        if text != named and len(key) in SECRET_BYTES:
            return key
    sizes = f"{SECRET_BYTES[0]} to {SECRET_BYTES[-1]} bytes in base64"
    raise ValueError(f"must be {SECRET_PREFIX} followed by {sizes}")


def _standard_signature(key: bytes, signed: bytes) -> bytes:
    return b"v1," + base64.b64encode(hmac.digest(key, signed, "sha256"))


def standard_headers(keys: Iterable[bytes], id: str, time: int, body: bytes) -> dict[str, str]:
    """Return the Standard Webhooks headers, with a signature for each key."""
    signed = f"{id}.{time}.".encode() + body
    texts = b" ".join(_standard_signature(key, signed) for key in keys).decode()
    return {"webhook-id": id, "webhook-timestamp": str(time), "webhook-signature": texts}


def _given_by_stripe(headers: Headers) -> tuple[Sequence[str], Sequence[str]]:
    parts = [part.strip() for part in headers.get("stripe-signature", "").split(",")]
    times = [part[2:] for part in parts if part.startswith("t=")]
    texts = [part[3:] for part in parts if part.startswith("v1=")]
    return texts, times if len(times) == 1 else [""]


def _stripe_id(_: Headers, body: bytes) -> bytes:
    """Return the id in a body, because the time and attempt number differ in a repetition."""
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        return body
    id = event.get("id") if isinstance(event, dict) else None
    return id.encode(errors="replace") if id and isinstance(id, str) else body


SCHEMES: Mapping[str, SignatureScheme] = {
    "github": SignatureScheme(
        given=lambda headers: ([headers.get("x-hub-signature-256", "")], ()),
        signature=lambda key, signed: b"sha256=" + _hex(key, signed),
        identity=lambda _, body: body,
        passed_on=("x-github-event", "x-github-delivery", "x-github-hook-id"),
    ),
    # A token, which signs nothing. Since version 17.4, repeated webhooks have the same
    # Idempotency-Key. Bodies do not identify a repetition. If a user reverts a push and pushes
    # again, two webhooks have equal bodies.
    "gitlab": SignatureScheme(
        given=lambda headers: ([headers.get("x-gitlab-token", "")], ()),
        signature=lambda key, _: key,
        identity=lambda headers, _: _raw(headers.get("idempotency-key", "")) or None,
        passed_on=("x-gitlab-event", "x-gitlab-event-uuid", "x-gitlab-instance", "idempotency-key"),
    ),
    "standard": SignatureScheme(
        given=lambda headers: (
            _standard(headers, "signature").split(),
            [_standard(headers, "id"), _standard(headers, "timestamp")],
        ),
        signature=_standard_signature,
        identity=lambda headers, _: _raw(_standard(headers, "id")) or None,
        passed_on=("webhook-id", "webhook-timestamp", "svix-id", "svix-timestamp"),
        key=standard_key,
    ),
    "stripe": SignatureScheme(_given_by_stripe, _hex, _stripe_id),
    # Verifies nothing. Use this scheme only behind a proxy that admits no other sender.
    "none": SignatureScheme(lambda _: (["none"], ()), lambda *_: b"none", lambda *_: None),
}


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
