"""Webhooks on each broker: what was answered with 202 is stored (W1), and once (W3)."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.brokers.base import Broker
from qdo.ingest import WebhookEndpoints, asgi, wsgi
from qdo.sending.messages import NewMessage
from tests.support.brokers import LOGS, opening
from tests.support.webhook_sender import SECRET, SIGNED, deliver, signed

WEBHOOKS, ATTEMPTS = 40, 4
"""Webhooks of each scheme, and how often each is sent."""
Receivers = tuple[list[Callable[..., Any]], Broker]


@pytest.fixture(params=LOGS)
def receivers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Receivers]:
    """A WSGI and an ASGI receiver of one app, each with its own connection to the broker."""
    monkeypatch.setenv("SECRET", SECRET)
    with opening(request.param, tmp_path, request) as connect, ExitStack() as stack:
        apps = [App("app", max_body_bytes=1000) for _ in range(2)]
        for app in apps:
            stack.enter_context(app.override_broker(connect(), app.settings))
            for scheme in SIGNED:
                app.webhook(f"/{scheme}", queue=scheme, verify=scheme, secret="env:SECRET")
        yield [wsgi(apps[0]), asgi(apps[1])], connect()


def check(receivers: Receivers) -> None:
    """Send each attempt beside others; it differs from those before it where it may."""
    endpoints, broker = receivers

    def play(given: tuple[int, int, str]) -> tuple[str, str, int]:
        number, attempt, scheme = given
        id, text = f"evt-{number}", "x" * 1000 * (number % 10 == 0)  # the app stores less
        event = {"id": id, "text": text, "n": attempt if scheme == "stripe" else 0}
        body = json.dumps(event).encode()
        headers = signed(scheme, body, id, time.time() - attempt)
        if scheme == "github":
            headers["x-github-delivery"] = f"{id}-{attempt}"
        return scheme, id, deliver(endpoints[attempt % 2], f"/{scheme}", body, headers)

    with ThreadPoolExecutor(8) as threads:
        plays = product(range(WEBHOOKS), range(ATTEMPTS), SIGNED)
        answers = list(threads.map(play, plays))
    assert {status for *_, status in answers} <= {202, 413}
    accepted = {(scheme, id) for scheme, id, status in answers if status == 202}
    stored = [(each, row) for each in SIGNED for row in broker.reader(each, 0).fetch(1000)]
    assert len(stored) > WEBHOOKS
    assert Counter((each, json.loads(row[1])["id"]) for each, row in stored) == Counter(accepted)


def test_answers_and_messages_agree(receivers: Receivers) -> None:
    check(receivers)


STORE, ASTORE, MESSAGE = (
    WebhookEndpoints.store,
    WebhookEndpoints.astore,
    WebhookEndpoints.message,
)


async def answered_first(*given: Any) -> int:
    return await ASTORE(*given) and 202


def without_key(*given: Any) -> NewMessage:
    return replace(MESSAGE(*given), dedup_key=None, dedup_seconds=None)


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("store", lambda *given: STORE(*given) and 202),
        ("astore", answered_first),
        ("message", without_key),
    ],
    ids=["W1: answer before the store", "W1 on asyncio", "W3: no deduplication key"],
)
def test_each_rule_is_needed(
    receivers: Receivers, name: str, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WebhookEndpoints, name, new)
    with pytest.raises(AssertionError):
        check(receivers)
