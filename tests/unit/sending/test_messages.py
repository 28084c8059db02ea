"""Options of sent messages: delays, keys, bytes, headers; and sending from coroutines."""

from __future__ import annotations

import asyncio
import datetime
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qdo
from qdo import App, NewMessage
from qdo.brokers.base import Broker, Capabilities, SendOptions
from qdo.encoding import is_raw, with_header
from qdo.errors import (
    BodyLimitError,
    MessageTooLargeError,
    SettingsError,
    UnsupportedError,
    UsageError,
)
from qdo.sending.messages import (
    MAX_HEADERS_BYTES,
    MAX_KEY,
    build_outgoing,
    build_send_options,
    outgoing_of,
)
from qdo.settings.sources import load
from qdo.testing import TestKit
from tests.support.fakes.scripted_broker import ScriptedBroker

UTC = datetime.UTC


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App("mail", broker=f"sqlite:{tmp_path}/messages.db") as app:
        app.use(load(environ={}))
        yield app


def rows(broker: Broker, queue: str) -> list[tuple[bytes, str | None, dict[str, str]]]:
    found = broker.reader(queue, 0).fetch(100_000)
    return [(body, key, json.loads(headers or "{}")) for _, body, key, headers in found]


# --- delays and keys ---


def test_a_delay_counts_from_now() -> None:
    """By the clock of the store, in seconds; 0 means no delay, and a time before 1970 is past."""
    assert build_send_options(delay_seconds=90) == SendOptions(-90.0)
    assert SendOptions(-90.0).due_at(1000.0) == 1090.0
    assert build_send_options(delay_seconds=0) is None
    assert build_send_options(at=-90) == SendOptions(0.0)


@pytest.mark.parametrize(
    "at",
    [
        1_700_000_000,
        1_700_000_000.0,
        datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
        datetime.datetime(
            2023, 11, 14, 23, 13, 20, tzinfo=datetime.timezone(datetime.timedelta(hours=1))
        ),
    ],
)
def test_a_time_may_be_a_number_or_a_datetime(at: Any) -> None:
    """Of any zone."""
    assert build_send_options(at=at) == SendOptions(1_700_000_000.0)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"delay_seconds": 1, "at": 1}, "delay_seconds"),
        ({"delay_seconds": -1}, "delay_seconds"),
        ({"delay_seconds": float("nan")}, "delay_seconds"),
        ({"delay_seconds": "5"}, "delay_seconds"),
        ({"delay_seconds": True}, "delay_seconds"),
        ({"delay_seconds": 1e30}, "9999"),
        ({"at": datetime.datetime(2023, 1, 1)}, "time zone"),
        ({"at": "2023-01-01"}, "'2023-01-01'"),
        ({"at": float("inf")}, "inf"),
        ({"dedup_seconds": 5}, "dedup_key"),
        ({"priority": -1}, "got -1"),
        ({"priority": 10}, "got 10"),
        ({"priority": True}, "got True"),
        ({"priority": "high"}, "got 'high'"),
        ({"dedup_key": ""}, "1000"),
        ({"dedup_key": "x" * 1001}, "1000"),
        ({"dedup_key": 5}, "dedup_key"),
        ({"dedup_key": "\ud800"}, "UTF-8"),
        ({"dedup_key": "k", "dedup_seconds": 0}, "dedup_seconds"),
        ({"dedup_key": "k", "dedup_seconds": float("inf")}, "dedup_seconds"),
        ({"dedup_key": "k", "dedup_seconds": 366 * 86_400 + 1}, "dedup_seconds"),
        ({"delay_second": 5}, "(did you mean 'delay_seconds'?)"),
    ],
)
def test_rejects_invalid_options(app: App, options: dict[str, Any], part: str) -> None:
    """Nothing is stored."""
    with pytest.raises(UsageError) as caught:
        app.send("q", 1, **options)
    assert part in caught.value.details["reason"]
    with pytest.raises(UsageError):
        app.send_many([("q", 1), {"queue": "q", "body": 1, **options}])
    assert app.broker.catalog.names() == []


def test_a_mistyped_option_names_its_call(app: App) -> None:
    """And the nearest option."""
    users = app.stream("users")
    calls = {
        "of send must": lambda wrong: app.send("q", 1, **wrong),
        "of asend must": lambda wrong: asyncio.run(app.asend("q", 1, **wrong)),
        "for a stream must": lambda wrong: users.send("ada", 1, **wrong),
        "of a request must": lambda wrong: app.request_many([{"pool": "q", "body": 1, **wrong}]),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError) as caught:
            call({"delay_second": 5})
        reason = caught.value.details["reason"]
        assert name in reason
        assert "got 'delay_second' (did you mean 'delay_seconds'?)" in reason
    assert app.broker.catalog.names() == []


def test_delayed_and_deduplicated(app: App) -> None:
    """Through the app, alone and together; the window is five minutes."""
    first = app.send("q", 1, dedup_key="k")
    assert app.send("q", 2, dedup_key="k", dedup_seconds=1) == first
    app.send("q", 3, delay_seconds=60)
    late = app.send("q", 4, at=time.time() + 60, dedup_key="late")
    assert app.send("q", 5, dedup_key="late") == late
    assert [body for body, _, _ in rows(app.broker, "q")] == [b"1"]
    assert app.broker.catalog.backlog("q", 0).delayed == 2
    assert build_outgoing(NewMessage("q", 1, dedup_key="k")).terms == SendOptions(None, "k", 300.0)


def test_a_broker_that_cannot_is_not_asked(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the remedy, before anything is stored."""
    poor = Capabilities(
        ordered=True, seekable=True, countable=True, delay=False, peek=True, max_body_bytes=10
    )
    monkeypatch.setattr(type(app.broker), "capabilities", poor)
    with pytest.raises(UnsupportedError) as caught:
        app.send("q", 1, delay_seconds=1)
    assert caught.value.details["what"] == "delay messages"
    with pytest.raises(UnsupportedError) as caught:
        app.send_many([("q", 1), NewMessage("q", 2, dedup_key="k")])
    assert caught.value.details["what"] == "deduplicate messages"
    app.send("q", 1, at=None)
    assert len(rows(app.broker, "q")) == 1


# --- forms of a message ---


def test_send_many_takes_tuples_dicts_and_values(app: App) -> None:
    """Mixed, in the order given, each with everything that send takes."""
    ids = app.send_many(
        [
            ("q", 1, "key"),
            {"queue": "q", "body": 2, "headers": {"h": "v"}, "dedup_key": "k"},
            NewMessage("q", 3, dedup_key="k"),
            qdo.NewMessage(queue="q", body=b"4", key="x"),
            NewMessage("q", 5, delay_seconds=60),
        ]
    )
    assert ids[1] == ids[2]
    assert len(set(ids)) == 4
    assert rows(app.broker, "q") == [
        (b"1", "key", {}),
        (b"2", None, {"h": "v"}),
        (b"4", "x", {"content-type": "application/octet-stream"}),
    ]
    assert app.broker.catalog.backlog("q", 0).delayed == 1


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (("q",), "(queue, body)"),
        (("q", 1, None, None, 5), "(queue, body)"),
        ("q", "'q'"),
        ({"queue": "q"}, "queue, body, key,"),
        ({"queue": "q", "body": 1, "delay": 5}, "'delay'"),
        ({1: "q"}, "queue, body, key,"),
    ],
)
def test_rejects_other_forms_of_a_message(message: Any, part: str) -> None:
    """The error names the valid forms."""
    with pytest.raises(UsageError) as caught:
        outgoing_of(message)
    assert part in caught.value.details["reason"]


# --- bytes and headers ---


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_stored_as_they_are(app: App, kind: Any) -> None:
    """With a header that marks them as bytes."""
    app.send("q", kind(b"\x00\xff{"))
    app.send("q", kind(b"\x89PNG"), headers={"Content-Type": "image/png", "h": "v"})
    assert rows(app.broker, "q") == [
        (b"\x00\xff{", None, {"content-type": "application/octet-stream"}),
        (b"\x89PNG", None, {"content-type": "image/png", "h": "v"}),
    ]


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("application/octet-stream", True),
        ("text/plain", True),
        ("", True),
        ("application/json", False),
        ("Application/JSON; charset=utf-8", False),
        ("application/problem+json", False),
        ("application/jsonp", True),
    ],
)
def test_the_content_type_decides(kind: str, raw: bool) -> None:
    """JSON of any kind is decoded, everything else stays bytes."""
    assert is_raw({"content-type": kind}) is raw
    assert is_raw({"Content-Type": kind}) is False
    assert is_raw({}) is False


def test_json_cannot_have_another_content_type() -> None:
    """The job would get it as bytes."""
    with pytest.raises(UsageError, match=r"content-type.*'text/plain'"):
        build_outgoing(NewMessage("q", "text", headers={"CONTENT-TYPE": "text/plain"}))
    assert (
        build_outgoing(NewMessage("q", 1, headers={"content-type": "application/json"})).body
        == b"1"
    )


def test_headers_of_qdo_are_not_passed_on() -> None:
    """A job may pass on its message's headers: the new message has its own id."""
    given = {"qdo-id": "x", "qdo-retried": "1", "h": "v"}
    assert build_outgoing(NewMessage("q", 1, headers=given)).headers == '{"h":"v"}'
    assert build_outgoing(NewMessage("q", 1, headers={"qdo-id": "x"})).headers is None
    assert with_header('{"a":"b"}', qdo_id="1") == '{"a":"b","qdo-id":"1"}'
    assert with_header("[]", qdo_id="1") == "[]"


# --- coroutines ---


def test_sending_from_coroutines(app: App) -> None:
    """Many at once share commits without own threads, and the loop keeps running meanwhile."""
    before = threading.active_count()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> list[str]:
        counting = asyncio.create_task(count())
        sent = await asyncio.gather(*(app.asend("q", number) for number in range(200)))
        assert threading.active_count() == before
        batch = await app.asend_many([("p", 1), NewMessage("p", b"2", dedup_key="k")])
        again = await app.asend("p", 3, dedup_key="k")
        counting.cancel()
        assert again == batch[1]
        return sent

    app.broker.catalog.names()
    commits = app.broker.commits  # type: ignore[attr-defined]
    ids = asyncio.run(main())
    assert len(set(ids)) == 200
    assert turns > 2
    assert app.broker.commits - commits < 100  # type: ignore[attr-defined]
    assert sorted(int(body) for body, _, _ in rows(app.broker, "q")) == list(range(200))
    assert [body for body, _, _ in rows(app.broker, "p")] == [b"1", b"2"]


def test_errors_reach_the_coroutine(app: App) -> None:
    """Those of the message and those of the broker."""

    async def main() -> None:
        with pytest.raises(UsageError, match="JSON"):
            await app.asend("q", {1, 2})
        with pytest.raises(MessageTooLargeError):
            await app.asend("q", b"x" * ((64 << 20) + 1))
        broker = app.broker
        await app.aclose()
        with pytest.raises(UsageError, match="closed"):
            await broker.asend_many([build_outgoing(NewMessage("q", 1))])

    asyncio.run(main())


def test_a_cancelled_coroutine_harms_nobody(app: App) -> None:
    """Its message may be stored; the others are sent."""

    async def main() -> None:
        first = asyncio.create_task(app.asend("q", 1))
        await asyncio.sleep(0)
        first.cancel()
        await app.asend("q", 2)
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())
    asyncio.run(main())  # on another loop, the first one is closed
    assert [body for body, _, _ in rows(app.broker, "q") if body == b"2"] == [b"2", b"2"]


def test_a_broker_without_coroutines_of_its_own_uses_a_thread() -> None:
    """The asyncio support of any broker."""
    outgoing = [build_outgoing(NewMessage("q", body)) for body in (1, 2)]
    assert asyncio.run(ScriptedBroker().asend_many(outgoing)) == ["1", "2"]


# --- limits --------------------------------------------------------------------------------


def test_a_body_has_the_size_of_the_setting_at_most() -> None:
    """The error names the setting; nothing of the call is stored."""
    app = qdo.App("bounded", max_body_bytes=10)
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
        qdo.App("bounded", max_body_bytes=value)


def test_keys_have_a_limit() -> None:
    """They are part of every log line, table and message group."""
    app = qdo.App("bounded")
    with TestKit(app, without_job=["*"]):
        app.send("q", 1, key="ö" * MAX_KEY)
        with pytest.raises(UsageError, match=str(MAX_KEY + 1)):
            app.send("q", 1, key="ö" * (MAX_KEY + 1))


def test_headers_have_a_limit() -> None:
    """All together, as JSON."""
    app = qdo.App("bounded")
    with TestKit(app, without_job=["*"]):
        app.send("q", 1, headers={"a": "x" * (MAX_HEADERS_BYTES - 8)})
        with pytest.raises(UsageError, match=str(MAX_HEADERS_BYTES + 1)):
            app.send("q", 1, headers={"a": "x" * (MAX_HEADERS_BYTES - 7)})
