"""Webhooks on each broker: what was answered with 202 is stored, once, and signed.

`violated` plays random deliveries against the WSGI app and compares answers and messages. Left-out
rules must violate an invariant.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qdo import App, signatures
from qdo.brokers.base import Broker
from qdo.ingest import WebhookEndpoints, wsgi
from qdo.signatures import GithubScheme, HmacScheme, StandardScheme, StripeScheme
from tests.support.brokers import LOGS, opening
from tests.support.webhook_sender import SCHEMES, SECRET, deliver, signed

MOST_BYTES = 1000
"""The largest body that is stored; larger ones are signed as well."""
GITHUB_ID, STANDARD_TIME = "x-github-delivery", "webhook-timestamp"


@pytest.fixture(params=LOGS)
def receivers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[WebhookEndpoints], Broker]]:
    """Two receivers of one app, each with a connection of its own to the broker."""
    monkeypatch.setenv("SECRET", SECRET)
    with opening(request.param, tmp_path, request) as connect, ExitStack() as stack:
        yield [endpoints(stack, connect) for _ in range(2)], connect()


def endpoints(stack: ExitStack, connect: Callable[[], Broker]) -> WebhookEndpoints:
    app = App("app", max_body_bytes=MOST_BYTES)
    for scheme in SCHEMES:
        app.webhook(f"/{scheme}", queue=scheme, verify=scheme, secret="env:SECRET")
    stack.enter_context(app.override_broker(connect(), app.settings))
    return wsgi(app)


class WebhookAttempt(NamedTuple):
    """One request of a sender, or of someone who has seen one; `genuine`: it must be stored."""

    scheme: str
    body: bytes
    headers: dict[str, str]
    genuine: bool = True


def attempt(chance: random.Random, scheme: str, number: int) -> WebhookAttempt:
    """Return an attempt to deliver the webhook of this number, or a request that is like one."""
    text = "x" * MOST_BYTES * (number % 10 == 0)
    body = json.dumps({"id": f"evt-{number}", "text": text, "n": 0}).encode()
    if scheme == "stripe":  # an attempt tells of the earlier ones
        body = body.replace(b'"n": 0', b'"n": %d' % chance.randrange(5))
    headers = signed(scheme, body, f"msg-{number}", time.time() - chance.randrange(60))
    way = chance.choice(("good", "good", "good", "forged", "old", "other id"))
    if way == "forged":
        headers |= {"x-gitlab-token": "guess"} if scheme == "gitlab" else {}
        return WebhookAttempt(scheme, body.replace(b"evt", b"bad"), headers, False)
    if way == "old" and scheme in ("standard", "stripe"):
        return WebhookAttempt(scheme, body, signed(scheme, body, f"msg-{number}", 1.6e9), False)
    if way == "other id" and scheme == "standard":
        return WebhookAttempt(scheme, body, {**headers, "webhook-id": "other"}, False)
    if way == "other id" and scheme == "github":
        headers["x-github-delivery"] = f"other-{chance.random()}"
    return WebhookAttempt(scheme, body, headers)


def violated(receivers: list[WebhookEndpoints], broker: Broker, seed: int) -> set[str]:
    """Return the invariants that a random history violates."""
    chance = random.Random(seed)
    webhooks = [(chance.choice(SCHEMES), number) for number in range(40)]
    attempts = [attempt(chance, *each) for each in webhooks * 6]

    def play(number: int) -> int:
        scheme, body, headers, _ = attempts[number]
        return deliver(receivers[number % 2], f"/{scheme}", body, headers)

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(play, range(len(attempts))))
    accepted = [each for each, status in zip(attempts, statuses, strict=True) if status == 202]
    stored = Counter(
        (scheme, json.loads(row[1])["id"])
        for scheme in SCHEMES
        for row in broker.reader(scheme, 0).fetch(1000)
    )
    assert len(stored) > 20
    lost = {(each.scheme, json.loads(each.body)["id"]) for each in accepted} - stored.keys()
    forged = [each for each in accepted if not each.genuine]
    doubled = [name for name, count in stored.items() if count > 1]
    return {name for name, found in (("W1", lost), ("W2", forged), ("W3", doubled)) if found}


def acknowledge_first(self: WebhookEndpoints, *delivery: Any) -> int:
    STORE(self, *delivery)
    return 202


def send_without_key(self: WebhookEndpoints, webhook: Any, identity: Any, content: Any) -> None:
    SEND(self, webhook, None, content)


STORE, SEND = WebhookEndpoints.store, WebhookEndpoints._send
MUTANTS: dict[str, tuple[str, Any, str, Any]] = {
    "answer before the store": ("W1", WebhookEndpoints, "store", acknowledge_first),
    "no signature": ("W2", HmacScheme, "verifies", lambda *_: True),
    "no time": ("W2", signatures, "TOLERANCE_SECONDS", 1e10),
    "no deduplication key": ("W3", WebhookEndpoints, "_send", send_without_key),
    "GitHub's unsigned id": ("W3", GithubScheme, "identity", lambda _, h, b: h[GITHUB_ID].encode()),
    "Stripe's whole body": ("W3", StripeScheme, "identity", lambda _, h, b: b),
    "the time": ("W3", StandardScheme, "identity", lambda _, h, b: h[STANDARD_TIME].encode()),
}
"""The violated invariant, and what is replaced."""


def test_answers_and_messages_agree(
    receivers: tuple[list[WebhookEndpoints], Broker],
) -> None:
    """Eight senders at once, two receivers."""
    assert violated(*receivers, seed=1) == set()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(
    receivers: tuple[list[WebhookEndpoints], Broker],
    mutant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invariant, owner, name, new = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, new)
    assert invariant in violated(*receivers, seed=1)
