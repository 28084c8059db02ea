"""Declarations of webhooks, answers of the WSGI app, messages, and `kit.deliver`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.errors import QueueNameError, UsageError
from qdo.ingest import wsgi
from qdo.testing import TestKit
from tests.support.webhook_sender import SECRET, deliver, signed

BODY = b'{"n": 1}'
GOOD: dict[str, Any] = {"path": "/a", "queue": "q", "verify": "github", "secret": "env:SECRET"}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setenv("SECRET", SECRET)
    app = App("hooks", max_body_bytes=100)
    app.webhook("/github", queue="github", verify="github", secret="env:SECRET", max_bytes=200)
    app.webhook("/open", queue="open", verify="none")
    return app


@pytest.mark.parametrize(
    "changed",
    [
        *({"path": path} for path in ("a", "", "/a b", "/a?b", "/a#b", "/a%20b", "/ä", "/a\n")),
        {"verify": "git"},
        {"verify": "none"},
        *({"secret": secret} for secret in (None, "", "geheim", "env:", "file:", "env:A,", "x:A")),
        *({"max_bytes": size} for size in (0, -1, True, 1.5, "1", 1 << 40)),
    ],
)
def test_a_declaration_is_checked(changed: dict[str, Any]) -> None:
    """At import; the error does not show a text that may be the secret."""
    with pytest.raises(UsageError) as found:
        App("hooks").webhook(**{**GOOD, **changed})
    assert "geheim" not in str(found.value)


def test_a_path_is_declared_once(app: App) -> None:
    with pytest.raises(UsageError):
        app.webhook("/open", queue="other", verify="none")
    with pytest.raises(QueueNameError):
        app.webhook("/b", queue="a/b", verify="none")


def test_an_app_without_webhooks_has_no_receiver() -> None:
    with pytest.raises(UsageError):
        wsgi(App("hooks"))


@pytest.mark.parametrize("text", ["", " \n", "whsec_#"])
def test_a_secret_must_be_there(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its variable or its file, which only its owner may read; the error does not show it."""
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(0o600)
    monkeypatch.setenv("SECRET", text)
    for place in ("env:SECRET", f"file:{file}", "env:MISSING", f"file:{file}.none"):
        app = App("hooks")
        app.webhook("/a", queue="q", verify="standard", secret=place)
        with pytest.raises(UsageError) as found:
            wsgi(app)
        assert "whsec_#" not in str(found.value)


def test_a_secret_can_be_replaced(tmp_path: Path, app: App) -> None:
    """Both are valid while two are given. A file that others may read is refused."""
    file = tmp_path / "new"
    file.write_text("other\n")
    app.webhook("/two", queue="two", verify="github", secret=f"file:{file}, env:SECRET")
    file.chmod(0o644)
    with pytest.raises(UsageError):
        wsgi(app)
    file.chmod(0o600)
    with TestKit(app, without_job="*"):
        assert deliver(wsgi(app), "/two", BODY, signed("github", BODY)) == 202


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
        ("/github/", {}, 404),
        ("/healthz", {"REQUEST_METHOD": "GET"}, 200),
    ],
)
def test_each_request_gets_its_status(
    app: App, path: str, environ: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And counts, except for health checks; the log has a line for all of them."""
    with TestKit(app, without_job="*") as kit:
        endpoints = wsgi(app)
        assert deliver(endpoints, path, BODY, signed("github", BODY), **environ) == status
        assert kit.broker.catalog.names() == (["github"] if status == 202 else [])
    with caplog.at_level(logging.INFO):
        endpoints.log_counts()
        endpoints.log_counts()
    name = "/github" if path == "/github" else "other paths"
    counted = [(f"{name} {status}: 1",)] if status != 200 else []
    assert [each.args for each in caplog.records] == counted


@pytest.mark.parametrize(
    ("kind", "body", "stored"),
    [
        ("application/json; charset=utf-8", b'{"a": "\xc3\xbc"}', {"a": "ü"}),
        ("application/json", b"{'a': 1}", b"{'a': 1}"),
        ("application/json", b"\xff", b"\xff"),
        ("application/x-www-form-urlencoded", b"payload=%7B%7D", b"payload=%7B%7D"),
        ("", b"[1]", [1]),
        ("", b"", b""),
        ("text/plain", b"[1]", b"[1]"),
        ("te\x01xt/plain", b"a", b"a"),
    ],
)
def test_a_body_arrives_as_it_was_sent(app: App, kind: str, body: bytes, stored: object) -> None:
    """JSON as a value; anything else as bytes, with its content type if that can be one."""
    found: list[tuple[object, str | None]] = []

    @app.job("open")
    def job(message: Any, context: Any) -> None:
        found.append((message.body, message.headers.get("content-type")))

    with TestKit(app) as kit:
        assert deliver(wsgi(app), "/open", body, {"content-type": kind}) == 202
        kit.run_until_idle()
    raw = isinstance(stored, bytes)
    usual = "application/octet-stream" if raw else None
    proper = kind.isprintable() and bool(kind) and not (raw and "json" in kind)
    assert found == [(stored, kind if proper else usual)]


def test_a_job_gets_the_headers_of_the_sender(app: App) -> None:
    """Those that describe the event; `kit.deliver` needs no signature."""
    found: list[dict[str, str]] = []

    @app.job("github")
    def job(message: Any, context: Any) -> None:
        found.append(dict(message.headers))

    headers = {"X-GitHub-Event": "push", "x-github-delivery": "ü", "cookie": "a"}
    with TestKit(app) as kit:
        assert [kit.deliver("/github", {"n": 1}, headers) for _ in range(2)] == [202, 202]
        assert kit.deliver("/none", {"n": 1}) == 404
        assert kit.deliver("/open", b"x" * 101) == 413
        kit.run_until_idle()
    assert found == [{"x-github-event": "push"}]


def test_webhooks_without_a_signature_are_all_stored(app: App) -> None:
    with TestKit(app, without_job="*") as kit:
        assert [kit.deliver("/open", {"n": 1}) for _ in range(2)] == [202, 202]
        assert kit.waiting("open") == [{"n": 1}, {"n": 1}]
