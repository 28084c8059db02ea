"""Webhooks on each broker: what was answered with 202 is stored (W1), and once (W3)."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.brokers.base import Broker
from qdo.ingest import WebhookEndpoints, wsgi
from qdo.signatures import SCHEMES
from tests.support.brokers import LOGS, opening
from tests.support.webhook_sender import SECRET, SIGNED, deliver, signed

WEBHOOKS, ATTEMPTS = 40, 4
"""Webhooks of each scheme, and how often each is sent."""
Receivers = tuple[list[WebhookEndpoints], Broker]


@pytest.fixture(params=LOGS)
def receivers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Receivers]:
    """Two receivers of one app, each with a connection of its own to the broker."""
    monkeypatch.setenv("SECRET", SECRET)
    with opening(request.param, tmp_path, request) as connect, ExitStack() as stack:
        apps = [App("app", max_body_bytes=1000) for _ in range(2)]
        for app in apps:
            stack.enter_context(app.override_broker(connect(), app.settings))
            for scheme in SIGNED:
                app.webhook(f"/{scheme}", queue=scheme, verify=scheme, secret="env:SECRET")
        yield [wsgi(app) for app in apps], connect()


def check(receivers: Receivers) -> None:
    """Send with eight threads; an attempt differs from those before it where it may."""
    endpoints, broker = receivers

    def play(place: int) -> tuple[str, str, int]:
        scheme, rest = SIGNED[place % 4], place // 4
        attempt, number = divmod(rest, WEBHOOKS)
        text = "x" * 1000 * (number % 10 == 0)  # the app stores less
        event = {"id": f"evt-{number}", "text": text, "n": attempt * (scheme == "stripe")}
        body, id = json.dumps(event).encode(), f"msg-{number}"
        headers = signed(scheme, body, id, time.time() - attempt)
        if scheme == "github":
            headers["x-github-delivery"] = f"{id}-{attempt}"
        status = deliver(endpoints[rest % 2], f"/{scheme}", body, headers)
        return scheme, str(event["id"]), status

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(play, range(len(SIGNED) * WEBHOOKS * ATTEMPTS)))
    assert {status for *_, status in answers} <= {202, 413}
    accepted = {(scheme, id) for scheme, id, status in answers if status == 202}
    stored = [(each, row) for each in SIGNED for row in broker.reader(each, 0).fetch(1000)]
    assert len(stored) > WEBHOOKS
    assert Counter((each, json.loads(row[1])["id"]) for each, row in stored) == Counter(accepted)


STORE, SEND = WebhookEndpoints.store, WebhookEndpoints._send
MUTANTS: dict[str, tuple[str, Any]] = {
    "W1: answer before the store": ("store", lambda *given: STORE(*given) and 202),
    "W3: no deduplication key": ("_send", lambda app, hook, _, body: SEND(app, hook, None, body)),
    "W3: GitHub's unsigned id": (
        "github",
        lambda headers, _: headers["x-github-delivery"].encode(),
    ),
    "W3: Stripe's whole body": ("stripe", lambda _, body: body),
    "W3: the time": ("standard", lambda headers, _: headers["webhook-timestamp"].encode()),
}
"""The method, or the scheme whose identity is replaced, and the replacement."""


def test_answers_and_messages_agree(receivers: Receivers) -> None:
    check(receivers)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(
    receivers: Receivers, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, new = MUTANTS[mutant]
    if name in SCHEMES:
        monkeypatch.setitem(SCHEMES, name, replace(SCHEMES[name], identity=new))  # type: ignore[arg-type]
    else:
        monkeypatch.setattr(WebhookEndpoints, name, new)
    with pytest.raises(AssertionError):
        check(receivers)
