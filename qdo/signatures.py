"""Signatures of webhooks: those that qdo makes, and those of the senders whose webhooks it stores.

A sender signs the body, some with an id and a time before it. Signatures are compared in constant
time, so the delay of an answer does not help to guess them.
"""

from __future__ import annotations

import abc
import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TOLERANCE_SECONDS = 300.0
"""How far the time of a signature may be from this machine's."""
SECRET_PREFIX = "whsec_"  # nosec B105 # only the prefix
SECRET_BYTES = range(16, 129)

Headers = Mapping[str, str]
"""Headers of a request, with names in lower case."""


class GivenSignatures(NamedTuple):
    """The signatures of a request, what they sign before the body, and the time in that, if any."""

    texts: Sequence[str]
    prefix: bytes = b""
    time: str | None = None


class SignatureScheme:
    """How a sender signs. This one does not: use it behind a proxy that admits no other sender.

    :ivar passed_on: headers that describe a webhook. Most schemes do not sign them.
    """

    passed_on: tuple[str, ...] = ()

    def key(self, secret: str) -> bytes:
        """Return the key of a secret; raise ValueError if it cannot be one."""
        return secret.encode()

    def verifies(self, keys: Sequence[bytes], headers: Headers, body: bytes, now: float) -> bool:
        """Return whether one of the keys has signed a request at about this Unix time."""
        return True

    def identity(self, headers: Headers, body: bytes) -> bytes | None:
        """Return the signed bytes that every attempt to send a verified webhook has.

        None: nothing tells a repetition from another webhook.
        """
        return None


class HmacScheme(SignatureScheme, abc.ABC):
    """Signs with HMAC-SHA256, by default the body alone."""

    def signature(self, key: bytes, signed: bytes) -> bytes:
        """Return a signature as it is in a header."""
        return hmac.new(key, signed, hashlib.sha256).hexdigest().encode()

    @abc.abstractmethod
    def given(self, headers: Headers) -> GivenSignatures:
        """Return the signatures of a request, and the signed bytes before its body."""

    def verifies(self, keys: Sequence[bytes], headers: Headers, body: bytes, now: float) -> bool:
        texts, prefix, time = self.given(headers)
        if time is not None:
            is_time = time.isascii() and time.isdecimal() and len(time) < 13
            if not is_time or abs(int(time) - now) > TOLERANCE_SECONDS:
                return False
        wanted = [self.signature(key, prefix + body) for key in keys]
        return any(hmac.compare_digest(each, _raw(text)) for each in wanted for text in texts)

    def identity(self, headers: Headers, body: bytes) -> bytes | None:
        return body


def _raw(text: str) -> bytes:
    """Return the bytes of a header, which WSGI decodes as Latin-1."""
    return text.encode("latin-1", "replace")


class GithubScheme(HmacScheme):
    passed_on = ("x-github-event", "x-github-delivery", "x-github-hook-id")

    def signature(self, key: bytes, signed: bytes) -> bytes:
        return b"sha256=" + super().signature(key, signed)

    def given(self, headers: Headers) -> GivenSignatures:
        return GivenSignatures([headers.get("x-hub-signature-256", "")])


class GitlabScheme(HmacScheme):
    """A token, which signs nothing.

    Since version 17.4 repetitions have the same Idempotency-Key. Bodies do not tell them: a push
    to a branch, another one back, and the first one again have two equal ones.
    """

    passed_on = ("x-gitlab-event", "x-gitlab-event-uuid", "x-gitlab-instance", "idempotency-key")

    def signature(self, key: bytes, signed: bytes) -> bytes:
        return key

    def given(self, headers: Headers) -> GivenSignatures:
        return GivenSignatures([headers.get("x-gitlab-token", "")])

    def identity(self, headers: Headers, body: bytes) -> bytes | None:
        return _raw(headers.get("idempotency-key", "")) or None


class StandardScheme(HmacScheme):
    """Standard Webhooks: id, time and body are signed. Svix has other names for the headers."""

    passed_on = ("webhook-id", "webhook-timestamp", "svix-id", "svix-timestamp")

    def key(self, secret: str) -> bytes:
        text = secret.removeprefix(SECRET_PREFIX)
        try:
            key = b"" if text == secret else base64.b64decode(text, validate=True)
        except ValueError:
            key = b""
        if len(key) not in SECRET_BYTES:
            sizes = f"{SECRET_BYTES[0]} to {SECRET_BYTES[-1]} bytes in base64"
            raise ValueError(f"must be {SECRET_PREFIX} followed by {sizes}")
        return key

    def signature(self, key: bytes, signed: bytes) -> bytes:
        return b"v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest())

    def given(self, headers: Headers) -> GivenSignatures:
        id, time, texts = (_branded(headers, name) for name in ("id", "timestamp", "signature"))
        prefix = b"%b.%b." % (_raw(id), _raw(time))
        return GivenSignatures(texts.split() if id else [], prefix, time)

    def identity(self, headers: Headers, body: bytes) -> bytes | None:
        return _raw(_branded(headers, "id")) or None

    def signed(self, keys: Sequence[bytes], id: str, time: int, body: bytes) -> dict[str, str]:
        """Return the headers of a webhook, with a signature for each key."""
        data = f"{id}.{time}.".encode() + body
        texts = b" ".join(self.signature(key, data) for key in keys).decode()
        return {"webhook-id": id, "webhook-timestamp": str(time), "webhook-signature": texts}


def _branded(headers: Headers, name: str) -> str:
    brand = "webhook" if "webhook-id" in headers else "svix"
    return headers.get(f"{brand}-{name}", "")


class StripeScheme(HmacScheme):
    """Time and body are signed. A repetition has another time, and the same id in its body."""

    def given(self, headers: Headers) -> GivenSignatures:
        parts = [part.strip() for part in headers.get("stripe-signature", "").split(",")]
        times = [part[2:] for part in parts if part.startswith("t=")]
        if len(times) != 1:
            return GivenSignatures([])
        texts = [part[3:] for part in parts if part.startswith("v1=")]
        return GivenSignatures(texts, _raw(times[0]) + b".", times[0])

    def identity(self, headers: Headers, body: bytes) -> bytes | None:
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            return body
        id = event.get("id") if isinstance(event, dict) else None
        return id.encode(errors="replace") if id and isinstance(id, str) else body


STANDARD = StandardScheme()
SCHEMES: Mapping[str, SignatureScheme] = {
    "github": GithubScheme(),
    "gitlab": GitlabScheme(),
    "standard": STANDARD,
    "stripe": StripeScheme(),
    "none": SignatureScheme(),
}


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
