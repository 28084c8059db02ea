"""Ringing for queues that are polled, on real coordinators."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from kazoo.protocol.connection import _CONNECTION_DROP

from qdo.app import App
from qdo.coordination.client import Client, connect
from qdo.coordination.doorbell_notifier import PAUSE_SECONDS, DoorbellNotifier
from qdo.coordination.member import Member
from qdo.coordination.znodes.layout import Layout
from qdo.message import Message
from qdo.settings.settings import Settings
from qdo.testing.memory_broker import MemoryStore
from qdo.worker import worker as worker_module
from qdo.worker.worker import Worker
from tests.support.engine import until
from tests.support.fakes.polled_broker import PolledBroker
from tests.support.fleet import LAYOUT, CountingEngine
from tests.support.forks.processes import run
from tests.support.paths import ROOT
from tests.support.processes import wait_until


def rings(client: Client, queue: str) -> int:
    """Return how often a queue was rung for."""
    stat = client.exists(LAYOUT.doorbell(queue))
    return 0 if stat is None else stat.version + 1


@pytest.fixture
def ringer(coordinator_url: str) -> Iterator[DoorbellNotifier]:
    made = DoorbellNotifier(coordinator_url, LAYOUT)
    yield made
    made.close()


def test_a_notification_writes_the_doorbell(ringer: DoorbellNotifier, outsider: Client) -> None:
    """The first one creates it."""
    ringer.ring(["a", "b"])
    wait_until(lambda: rings(outsider, "a") == rings(outsider, "b") == 1, "both are rung")
    time.sleep(PAUSE_SECONDS)
    ringer.ring(["a"])
    wait_until(lambda: rings(outsider, "a") == 2, "it is rung again")
    assert rings(outsider, "b") == 1
    assert outsider.get(LAYOUT.doorbell("a"))[0] == b""


@pytest.mark.slow
def test_a_queue_is_notified_once_a_second(ringer: DoorbellNotifier, outsider: Client) -> None:
    """For any number of messages; and once more for messages sent in between."""
    ringer.ring(["a"])
    wait_until(lambda: rings(outsider, "a") == 1, "it is rung")
    began = time.monotonic()
    while time.monotonic() < began + 1.5 * PAUSE_SECONDS:
        ringer.ring(["a"])
        time.sleep(0.001)
    wait_until(lambda: rings(outsider, "a") >= 3, "the last messages are notified")
    assert rings(outsider, "a") == 3


def test_closing_sends_pending_notifications(coordinator_url: str, outsider: Client) -> None:
    """A script may send one message and end; a closed notifier does nothing."""
    ringer = DoorbellNotifier(coordinator_url, LAYOUT)
    ringer.ring(["a"])
    ringer.close()
    assert rings(outsider, "a") == 1
    ringer.ring(["a"])
    ringer.close()
    assert rings(outsider, "a") == 1


def test_threads_and_loops_notify(ringer: DoorbellNotifier, outsider: Client) -> None:
    """From plain threads, and from coroutines whose loop keeps running."""

    async def many() -> None:
        for number in range(50):
            ringer.ring([f"loop-{number}"])
            await asyncio.sleep(0)

    threads = [threading.Thread(target=ringer.ring, args=([f"thread-{n}"],)) for n in range(50)]
    for thread in threads:
        thread.start()
    asyncio.run(many())
    for thread in threads:
        thread.join()
    names = [f"{kind}-{n}" for kind in ("loop", "thread") for n in range(50)]
    wait_until(lambda: all(rings(outsider, name) for name in names), "all are rung")


@pytest.mark.slow
def test_an_unreachable_coordinator_is_not_the_sender_s_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once, and no call waits: neither a thousand notifications nor closing."""
    caplog.set_level(logging.WARNING)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ringer = DoorbellNotifier(f"zookeeper://127.0.0.1:{silent.getsockname()[1]}", LAYOUT)
        for number in range(1000):
            ringer.ring([f"q{number}"])
        assert caplog.records == [], "the first attempt to connect still waits"
        wait_until(lambda: bool(caplog.records), "the warning")
        ringer.ring(["more"])
        ringer.close()
    assert [record.name for record in caplog.records] == ["qdo.coordination.doorbell_notifier"]


def test_an_unusable_file_is_not_the_sender_s_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator in a sender's settings need not work."""
    (tmp_path / "c.db").write_bytes(b"no database" * 1000)
    ringer = DoorbellNotifier(f"sqlite:{tmp_path / 'c.db'}", LAYOUT)
    ringer.ring(["q"])
    wait_until(lambda: bool(caplog.records), "the warning")
    ringer.close()
    assert caplog.records[0].name == "qdo.coordination.doorbell_notifier"


def test_a_member_hears_the_bells_it_attends(
    coordinator_url: str, ringer: DoorbellNotifier
) -> None:
    """Each once, also the one whose bell did not exist; and after a lost connection."""
    heard: list[str] = []
    client = connect(coordinator_url)
    member = Member(
        client, LAYOUT, CountingEngine([]), component={"host": "test"}, on_doorbell=heard.append
    )
    member.start()
    try:
        member.watch_doorbells([f"q{number}" for number in range(1000)])
        ringer.ring(["q7", "q500", "other"])
        wait_until(lambda: sorted(heard) == ["q500", "q7"], "both are heard")
        client._call(_CONNECTION_DROP, None)
        ringer.ring(["q8"])
        wait_until(lambda: heard[2:] == ["q8"], "it is heard after the connection is back")
        member.watch_doorbells([], ["q9"])
        ringer.ring(["q9", "q10"])
        wait_until(lambda: heard[3:] == ["q10"], "only the one that is attended")
    finally:
        member.stop()


@pytest.mark.slow
def test_a_ring_has_a_resting_queue_asked_for_at_once(
    coordinator_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete worker, and a sender in the same process: no other part would poll."""
    store = MemoryStore()
    broker, other = PolledBroker(store, "test"), PolledBroker(store, "test")
    monkeypatch.setattr(worker_module, "open_broker", lambda *args: broker)
    monkeypatch.setattr("qdo.brokers.registry.open_broker", lambda *args: other)
    app = App("test")
    sender = App("test")
    seen: list[Any] = []

    @app.job()
    def job(message: Message, context: Any) -> None:
        seen.append(message.body)

    settings = Settings(app="test", coordinator=coordinator_url, doorbell=True)
    app.use(settings)
    sender.use(settings)
    worker = Worker(app, settings)
    running = gevent.spawn(worker.run)
    sender.send("q", 1)
    until(lambda: seen == [1], "what was there when the claim began")
    sender.send("q", 2)
    until(lambda: seen == [1, 2], "the first ring")
    sender.send("q", 3)
    sender.send("q", 4)
    until(lambda: seen == [1, 2, 3, 4], "the next ones")
    asyncio.run(sender.asend("q", 5))
    until(lambda: len(seen) == 5, "from a coroutine")
    assert set(broker.rung) == {"q"}
    sender.close()
    worker.request_stop()
    assert running.get(timeout=20.0) == 0


def test_without_the_setting_nobody_rings(
    coordinator_url: str, outsider: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No connection is made; nor is one where the broker wakes its readers itself."""
    polled = PolledBroker(MemoryStore(), "test")
    monkeypatch.setattr("qdo.brokers.registry.open_broker", lambda *args: polled)
    with App("test", coordinator=coordinator_url) as app:
        app.send("q", 1)
        assert polled.on_sent is None
    monkeypatch.undo()
    file = f"sqlite:{tmp_path / 'm.db'}"
    with App("test", coordinator=coordinator_url, doorbell=True, broker=file) as app:
        app.send("q", 1)
        assert app.broker.on_sent is None
    assert outsider.exists(Layout.of("test").doorbells) is None


def test_a_script_that_just_ends_is_heard(
    coordinator_url: str, outsider: Client, tmp_path: Path
) -> None:
    """Its last rings are made at its exit, in gevent and without."""
    script = (
        "{patch}\n"
        "from qdo.coordination.znodes.layout import Layout\n"
        "from qdo.coordination.doorbell_notifier import DoorbellNotifier\n"
        "DoorbellNotifier({url!r}, Layout.of('fleet')).ring(['{queue}'])\n"
    )
    for queue, patch in (("plain", ""), ("patched", "import gevent.monkey as m; m.patch_all()")):
        text = script.format(patch=patch, url=coordinator_url, queue=queue)
        done = run(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert rings(outsider, queue) == 1
