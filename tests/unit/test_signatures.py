"""Signatures of webhooks: the senders' published vectors, and what a change of a request does."""

from __future__ import annotations

import json
import random
import re

import pytest

from qdo import App
from qdo.ingest import wsgi
from qdo.signatures import SCHEMES
from qdo.testing import TestKit
from tests.support.webhook_sender import SCHEMES as SIGNED
from tests.support.webhook_sender import SECRET, deliver, signed

NOW = 1_614_265_330
STRIPE_FIXTURE = (
    '{"id":"evt_123","object":"event","account":"acct_123","api_version":"2017-05-25",'
    '"created":1533204620,"data":{"object":{"id":"cus_123","object":"customer",'
    '"created":123456789,"email":"test@stripe.com","livemode":false,"metadata":{}}},'
    '"livemode":false,"pending_webhooks":1,"request":{"id":"req_123",'
    '"idempotency_key":"idempotency-key-123"},"type":"customer.created"}'
)
STRIPE_EVENT = f"{json.dumps(json.loads(STRIPE_FIXTURE), indent=2)}\n".encode()
STRIPE_V1 = "2220f87ef101a04665f11cdf770523143f875572008577fa0f20882ddb9cc3c7"
GITHUB_DIGEST = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
STANDARD_TEXT = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
STANDARD_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
STANDARD_BODY = b'{"test": 2432232314}'


def verifies(scheme: str, secret: str, headers: dict[str, str], body: bytes, now: float) -> bool:
    found = SCHEMES[scheme]
    return found.verifies([found.key(secret)], headers, body, now)


def test_the_vector_of_githubs_documentation_verifies() -> None:
    headers = {"x-hub-signature-256": f"sha256={GITHUB_DIGEST}"}
    secret = "It's a Secret to Everybody"
    assert verifies("github", secret, headers, b"Hello, World!", NOW)
    assert not verifies("github", secret, headers, b"Hello, World?", NOW)


@pytest.mark.parametrize("brand", ["webhook", "svix"])
def test_the_vector_of_standard_webhooks_verifies(brand: str) -> None:
    """That of its libraries, for 5 minutes to either side, among other signatures."""
    other = STANDARD_TEXT.replace("g0hM", "Ceo5")
    texts = " ".join((other, other.replace("v1", "v2"), STANDARD_TEXT, other))
    headers = {f"{brand}-id": STANDARD_ID, f"{brand}-timestamp": str(NOW)}
    headers[f"{brand}-signature"] = texts
    for seconds, good in ((-301, False), (-299, True), (0, True), (299, True), (301, False)):
        assert verifies("standard", SECRET, headers, STANDARD_BODY, NOW + seconds) == good


@pytest.mark.parametrize(
    "changed",
    [
        {"webhook-id": ""},
        {"webhook-timestamp": ""},
        {"webhook-timestamp": "hello"},
        {"webhook-timestamp": "9" * 5000},
        {"webhook-timestamp": f"+{NOW}"},
        {"webhook-signature": ""},
        {"webhook-signature": "v1,"},
        {"webhook-signature": STANDARD_TEXT[:8]},
        {"webhook-signature": STANDARD_TEXT.replace("v1", "v2")},
        {"webhook-signature": "v1,ü€"},
    ],
)
def test_a_request_of_standard_webhooks_needs_each_part(changed: dict[str, str]) -> None:
    """The cases of its libraries' own tests, and some more."""
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    headers = dict(zip(names, (STANDARD_ID, str(NOW), STANDARD_TEXT), strict=True))
    assert verifies("standard", SECRET, headers, STANDARD_BODY, NOW)
    assert not verifies("standard", SECRET, {**headers, **changed}, STANDARD_BODY, NOW)


def test_the_vector_of_stripes_library_verifies() -> None:
    """That of stripe-dotnet, whose fixture has a signature of another version, too."""
    header = f"t=1533204620,v1={STRIPE_V1},v0={'63f3' * 16}"
    for text, now, good in (
        (header, 1533204720, True),
        (f"v1=bad,{header}", 1533204720, True),
        (header, 1533205020, False),
        (header.replace("v1=", "v0="), 1533204720, False),
        (f"t=1533204620,{header}", 1533204720, False),
        *((bad, 0, False) for bad in (f"t=,v1={STRIPE_V1}", "t,v1=,v0=", "t,,", ",,", "t", "")),
    ):
        headers = {"stripe-signature": text}
        assert verifies("stripe", "webhook_secret", headers, STRIPE_EVENT, now) == good, text


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_####", SECRET[6:], "whsec_" + "A" * 8])
def test_a_secret_of_standard_webhooks_has_a_form(secret: str) -> None:
    with pytest.raises(ValueError, match="whsec_"):
        SCHEMES["standard"].key(secret)


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return bytes with a part changed, cut, doubled or moved."""
    at, end = sorted(chance.choices(range(len(data) + 1), k=2))
    part = data[at:end]
    new = chance.choice(
        (b"", part * 2, part[::-1], part.swapcase(), bytes([chance.randrange(256)]))
    )
    return data[:at] + new + data[end:]


def covered(scheme: str, headers: dict[str, str], body: bytes) -> tuple[str | bytes, ...]:
    """Return what the signature of a request covers."""
    if scheme == "gitlab":
        return (headers["x-gitlab-token"],)
    if scheme == "standard":
        return headers["webhook-id"], headers["webhook-timestamp"], body
    return (*re.findall(r"(?:^|,) *t=(\d+)", headers.get("stripe-signature", "")), body)


@pytest.mark.parametrize("scheme", SIGNED)
def test_no_mutated_request_is_stored(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 of each scheme, 10,000 in all; stored only if what is signed has not changed."""
    monkeypatch.setenv("SECRET", SECRET)
    app = App("hooks")
    app.webhook("/", queue="q", verify=scheme, secret="env:SECRET")
    chance = random.Random(scheme)
    body = b'{"action": "opened", "number": 17, "text": "\xc3\xbc\\u00fc"}'
    headers, stored = signed(scheme, body, "msg_17"), 0
    with TestKit(app, without_job="*") as kit:
        endpoints = wsgi(app)
        for _ in range(2500):
            new_headers, new_body = dict(headers), body
            name = chance.choice(["body", *headers])
            if name == "body":
                new_body = mutated(chance, body)
            else:
                new_headers[name] = mutated(chance, headers[name].encode()).decode("latin-1")
            status = deliver(endpoints, "/", new_body, new_headers)
            assert status in (202, 401)
            stored += status == 202
            same = covered(scheme, new_headers, new_body) == covered(scheme, headers, body)
            assert status == 401 or same
        assert 0 < stored < 2500
        assert scheme == "gitlab" or len(kit.waiting("q")) == 1
