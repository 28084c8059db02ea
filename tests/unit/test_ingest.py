"""Declarations of webhooks, answers of the WSGI app, messages, and `kit.deliver`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.errors import UsageError
from qdo.ingest import asgi, wsgi
from qdo.testing import TestKit
from tests.support.webhook_sender import SECRET, deliver, signed

BODY = b'{"n": 1}'
GOOD: dict[str, Any] = {"path": "/a", "queue": "q", "verify": "github", "secret": "env:SECRET"}
JSON, FORM, RAW = (
    "application/json",
    "application/x-www-form-urlencoded",
    "application/octet-stream",
)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> App:
    """An app with a webhook whose secret is being replaced, and one without."""
    monkeypatch.setenv("SECRET", SECRET)
    (tmp_path / "old").write_text("other\n")
    (tmp_path / "old").chmod(0o600)
    app = App("hooks", max_body_bytes=100)
    secrets = f"file:{tmp_path}/old, env:SECRET"
    app.webhook("/github", queue="github", verify="github", secret=secrets, max_bytes=200)
    app.webhook("/open", queue="open", verify="none")
    return app


@pytest.mark.parametrize(
    "changed",
    [
        *({"path": path} for path in ("a", "", "/a b", "/a?b", "/a#b", "/a%20b", "/ä", "/a\n")),
        {"path": "/open"},
        {"queue": "a/b"},
        {"verify": "git"},
        {"verify": "none"},
        *({"secret": secret} for secret in (None, "", "geheim", "env:", "file:", "env:A,", "x:A")),
        *({"max_bytes": size} for size in (0, -1, True, 1.5, "1", 1 << 40)),
    ],
)
def test_a_declaration_is_checked(app: App, changed: dict[str, Any]) -> None:
    """At import; the error does not show a text that may be the secret."""
    with pytest.raises(UsageError) as found:
        app.webhook(**{**GOOD, **changed})
    assert "geheim" not in str(found.value)


@pytest.mark.parametrize("text", ["", " \n", "whsec_#"])
@pytest.mark.parametrize(
    "place", ["env:SECRET", "file:secret", "env:NONE", "file:none", "file:open"]
)
def test_a_secret_must_be_there(
    text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its variable or its file, which only its owner may read; the error does not show it."""
    monkeypatch.chdir(tmp_path)
    Path("open").write_text(SECRET)
    Path("open").chmod(0o644)
    monkeypatch.setenv("SECRET", text)
    Path("secret").write_text(text)
    Path("secret").chmod(0o600)
    app = App("hooks")
    app.webhook("/a", queue="q", verify="standard", secret=place)
    with pytest.raises(UsageError) as found:
        wsgi(app)
    assert "whsec_#" not in str(found.value)


@pytest.mark.parametrize(
    ("path", "environ", "status"),
    [
        ("/github", {}, 202),
        ("/github", {"HTTP_X_HUB_SIGNATURE_256": "sha256=00"}, 401),
        ("/github", {"HTTP_X_HUB_SIGNATURE_256": ""}, 401),
        ("/github", {"REQUEST_METHOD": "GET"}, 405),
        ("/github", {"CONTENT_LENGTH": ""}, 411),
        ("/github", {"CONTENT_LENGTH": "201"}, 413),
        ("/github", {"CONTENT_LENGTH": "9"}, 400),
        ("/github", {"HTTP_TRANSFER_ENCODING": "chunked"}, 411),
        ("/github/", {}, 404),
        ("/healthz", {"REQUEST_METHOD": "GET"}, 200),
    ],
)
def test_each_request_gets_its_status(
    app: App, path: str, environ: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And counts, except for health checks; the log has a line for all of them."""
    with TestKit(app, without_job="*") as kit, caplog.at_level(logging.INFO):
        endpoints = wsgi(app)
        for each in (endpoints, asgi(app)):
            assert deliver(each, path, BODY, signed("github", BODY), **environ) == status
        assert kit.broker.catalog.names() == (["github"] if status == 202 else [])
        endpoints.log_counts()
        endpoints.log_counts()
    name = "/github" if path == "/github" else "other paths"
    counted = [(f"{name} {status}: 1",)] if status != 200 else []
    assert [each.args for each in caplog.records] == counted


@pytest.mark.parametrize(
    ("kind", "body", "stored", "kept"),
    [
        ("application/json; a=b", b'{"a": "\xc3\xbc"}', {"a": "ü"}, "application/json; a=b"),
        ("application/json", b"{'a': 1}", b"{'a': 1}", RAW),
        ("application/json", b"\xff", b"\xff", RAW),
        ("text/csv", b"1;2", b"1;2", "text/csv"),
        ("text/plain", b"[1]", b"[1]", "text/plain"),
        ("te\x01xt/plain", b"a", b"a", RAW),
        ("", b"[1]", [1], None),
        ("", b"", b"", RAW),
    ],
)
def test_a_job_gets_the_webhook_as_it_was_sent(
    app: App, kind: str, body: bytes, stored: object, kept: str | None
) -> None:
    """JSON as a value, anything else as bytes, and the headers that describe the event."""
    found: list[Any] = []
    app.job("github")(lambda message, context: found.extend([message.body, dict(message.headers)]))
    headers = {**signed("github", body), "content-type": kind, "cookie": "a"}
    headers |= {"X-GitHub-Event": "push", "x-github-delivery": "ü"}
    with TestKit(app) as kit:
        assert deliver(wsgi(app), "/github", body, headers) == 202
        kit.run_until_idle()
    wanted = {"x-github-event": "push", "content-type": kept}
    assert found == [stored, {name: text for name, text in wanted.items() if text}]


def test_the_kit_needs_no_signature(app: App) -> None:
    """Webhooks that have none are all stored."""
    with TestKit(app, without_job="*") as kit:
        assert [kit.deliver("/github", {"n": 1}) for _ in range(2)] == [202, 202]
        assert [kit.deliver("/open", {"n": 1}) for _ in range(2)] == [202, 202]
        assert kit.deliver("/none", {"n": 1}) == 404
        assert kit.deliver("/open", b"x" * 101) == 413
        assert [len(kit.waiting(queue)) for queue in ("github", "open")] == [1, 2]
