"""Signatures of webhooks: the senders' published vectors, and what a change of a request does."""

from __future__ import annotations

import json
import random

import pytest

from qdo import App
from qdo.ingest import wsgi
from qdo.testing import TestKit
from qdo.webhook_signatures import SCHEMES
from tests.support.webhook_sender import SECRET, SIGNED, deliver, signed

STRIPE_EVENT = (
    '{"id":"evt_123","object":"event","account":"acct_123","api_version":"2017-05-25",'
    '"created":1533204620,"data":{"object":{"id":"cus_123","object":"customer",'
    '"created":123456789,"email":"test@stripe.com","livemode":false,"metadata":{}}},'
    '"livemode":false,"pending_webhooks":1,"request":{"id":"req_123",'
    '"idempotency_key":"idempotency-key-123"},"type":"customer.created"}'
)
HUB = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
V1 = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
STRIPE_V1 = "v1=2220f87ef101a04665f11cdf770523143f875572008577fa0f20882ddb9cc3c7"
STRIPE = f"t=1533204620,v1=bad,{STRIPE_V1},v0={'63f3' * 16}"
OTHER = V1.replace("g0hM", "Ceo5")
STANDARD = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": f"{OTHER} {OTHER.replace('v1', 'v2')} {V1} {OTHER}",
}
VECTORS: dict[str, tuple[str, dict[str, str], str, float]] = {
    "github": ("It's a Secret to Everybody", {"x-hub-signature-256": HUB}, "Hello, World!", 0),
    "standard": (SECRET, STANDARD, '{"test": 2432232314}', 1614265330),
    "stripe": (
        "webhook_secret",
        {"stripe-signature": STRIPE},
        json.dumps(json.loads(STRIPE_EVENT), indent=2) + "\n",
        1533204620,
    ),
}
"""Secret, headers, body and signed time: of GitHub's documentation, the libraries of Standard
Webhooks, and stripe-dotnet."""
BAD = {
    "x-hub-signature-256": ("", "sha256=", HUB[7:], HUB.replace("256", "1"), HUB[:-1], HUB + "0"),
    "webhook-id": ("", "msg"),
    "webhook-timestamp": ("", "hello", "9" * 5000, "+1614265330", "1614265330\n", "1614265331"),
    "webhook-signature": ("", "v1,", V1[:8], V1.replace("v1", "v2"), "v1,ü€", OTHER),
    "stripe-signature": (
        *("", "t", ",,", "t,,", "t,v1=,v0=", f"t=,{STRIPE_V1}", f"t=1533204621,{STRIPE_V1}"),
        *(STRIPE_V1, f"t=1533204620,{STRIPE}", STRIPE.replace("v1=", "v0=")),
    ),
}
"""Headers with which no signature is valid, among them the cases of the libraries' own tests."""


def verifies(vector: str, more: str = "", later: float = 0, **changed: str) -> bool:
    secret, headers, body, time = VECTORS[vector]
    found, keys = SCHEMES[vector], [SCHEMES[vector].key(secret)]
    return found.verifies(keys, {**headers, **changed}, (body + more).encode(), time + later)


@pytest.mark.parametrize("vector", VECTORS)
def test_published_vectors_verify(vector: str) -> None:
    """Only their body, and for 5 minutes to either side of a signed time."""
    assert verifies(vector)
    assert not verifies(vector, " ")
    for seconds, near in ((-301, False), (-299, True), (299, True), (301, False)):
        assert verifies(vector, later=seconds) == (near or vector == "github")


def test_names_of_svix_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = {name.replace("webhook", "svix"): text for name, text in STANDARD.items()}
    monkeypatch.setitem(VECTORS, "standard", (SECRET, renamed, *VECTORS["standard"][2:]))
    test_published_vectors_verify("standard")


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in BAD for text in BAD[name]])
def test_each_part_of_a_signature_is_needed(name: str, text: str) -> None:
    (vector,) = (each for each, (_, headers, *_) in VECTORS.items() if name in headers)
    assert not verifies(vector, **{name: text})


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return bytes with a part changed, cut, doubled or moved."""
    at, end = sorted(chance.choices(range(len(data) + 1), k=2))
    part, byte = data[at:end], bytes([chance.randrange(256)])
    return (
        data[:at] + chance.choice((b"", part * 2, part[::-1], part.swapcase(), byte)) + data[end:]
    )


@pytest.mark.parametrize("scheme", SIGNED)
def test_no_mutated_request_is_stored(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 of each scheme, 10,000 in all; stored only if what is signed has not changed."""
    monkeypatch.setenv("SECRET", SECRET)
    app = App("hooks")
    app.webhook("/", queue="q", verify=scheme, secret="env:SECRET")
    chance, statuses = random.Random(scheme), list[int]()
    body = b'{"action": "opened", "number": 17, "text": "\xc3\xbc\\u00fc"}'
    original = {**signed(scheme, body, "msg_17"), "body": body.decode("latin-1")}
    with TestKit(app, without_job="*") as kit:
        endpoints = wsgi(app)
        for _ in range(2500):
            headers = dict(original)
            name = chance.choice(list(headers))
            headers[name] = mutated(chance, headers[name].encode("latin-1")).decode("latin-1")
            body = headers.pop("body").encode("latin-1")
            statuses.append(deliver(endpoints, "/", body, headers))
            assert statuses[-1] == 401 or headers.get("x-gitlab-token") in (None, SECRET)
        assert {*statuses} == {202, 401}
        # A stored change of a body or id would be another message.
        assert scheme == "gitlab" or len(kit.waiting("q")) == 1
