"""Limits of what a sender may give."""

from __future__ import annotations

import pytest

import qdo
from qdo.errors import BodyLimitError, SettingsError, UsageError
from qdo.sending.messages import MAX_HEADERS_BYTES, MAX_KEY
from qdo.testing import TestKit


def app_of(**settings: object) -> qdo.App:
    """Return an app whose messages nobody processes."""
    return qdo.App("bounded", **settings)


def test_a_body_has_the_size_of_the_setting_at_most() -> None:
    """The error names the setting; nothing of the call is stored."""
    app = app_of(max_body_bytes=10)
    bodies = []
    app.job()(lambda message, context: bodies.append(message.body))
    with TestKit(app) as kit:
        app.send("q", "x" * 8)
        for body in ("x" * 9, b"x" * 11):
            with pytest.raises(BodyLimitError) as caught:
                app.send_many([("q", 1), ("q", body)])
            assert caught.value.details == {
                "queue": "q",
                "size": 11,
                "limit": 10,
                "most": 67_108_864,
            }
        kit.run_until_idle()
    assert bodies == ["x" * 8]


@pytest.mark.parametrize("value", [0, -1, 64 * 1024 * 1024 + 1])
def test_the_limit_of_bodies_is_checked(value: int) -> None:
    """It cannot exceed what brokers in a file store."""
    with pytest.raises(SettingsError):
        app_of(max_body_bytes=value)


def test_keys_have_a_limit() -> None:
    """They are part of every log line, table and message group."""
    app = app_of()
    with TestKit(app, without_job=["*"]):
        app.send("q", 1, key="ö" * MAX_KEY)
        with pytest.raises(UsageError, match=str(MAX_KEY + 1)):
            app.send("q", 1, key="ö" * (MAX_KEY + 1))


def test_headers_have_a_limit() -> None:
    """All together, as JSON."""
    app = app_of()
    with TestKit(app, without_job=["*"]):
        app.send("q", 1, headers={"a": "x" * (MAX_HEADERS_BYTES - 8)})
        with pytest.raises(UsageError, match=str(MAX_HEADERS_BYTES + 1)):
            app.send("q", 1, headers={"a": "x" * (MAX_HEADERS_BYTES - 7)})
