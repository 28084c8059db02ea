"""`app.cancel`, `peek`, `pause`, `resume`, `retry_now` and `skip`: the commands for Python."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial

import pytest

import qdo
from qdo.errors import (
    MessageNotFailingError,
    NotFailingError,
    NotFoundError,
    PartialFailureError,
)
from qdo.fleet.audit import read_entries
from tests.support.app_runs import OperatorDesk
from tests.support.processes import wait_until


@pytest.fixture
def app(desk: OperatorDesk) -> Iterator[qdo.App]:
    """The app of the desk as a web server has it."""
    with qdo.App("desk", broker=desk.broker_url, coordinator=desk.coordinator) as app:
        yield app


def test_a_reminder_is_cancelled_as_soon_as_it_is_sent(app: qdo.App, desk: OperatorDesk) -> None:
    """In a queue that no worker has seen; with the errors of the command, and its entry."""
    id = app.send("remind-ada", 1, delay_seconds=3600)
    other = app.send("remind-ada", 2)
    assert [each.id for each in app.peek("remind-ada", kind="delayed")] == [id]
    assert app.cancel("remind-ada", id, reason="paid") == {id: "cancelled"}
    assert app.cancel("remind-ada", id, other) == {id: "already-cancelled", other: "cancelled"}
    assert app.peek("remind-ada") == []
    with pytest.raises(NotFoundError):
        app.cancel("remind-bob", id)
    with pytest.raises(NotFoundError):
        app.cancel("remind-ada", str(10**20))
    first = desk.audit("cancel")[-1]
    assert (first.reason, first.before) == ("paid", {"messages": id})
    desk.drain()
    assert desk.bodies("remind-ada") == []


def test_calls_without_a_reason_leave_no_entries(app: qdo.App, desk: OperatorDesk) -> None:
    """A job may cancel a reminder for each payment: the log is for what operators change."""
    app.send("q", 0)
    desk.work()
    desk.wait_for(0)
    app.pause("q", timeout_seconds=30)
    waiting, delayed, last = (
        app.send("q", 1),
        app.send("q", 2, delay_seconds=3600),
        app.send("q", 3),
    )
    assert app.cancel("q", waiting, delayed) == dict.fromkeys([waiting, delayed], "cancelled")
    assert app.cancel("q", waiting) == {waiting: "already-cancelled"}
    app.resume("q")
    desk.wait_for(3)
    reminder = app.send("q2", 1, delay_seconds=3600)
    assert app.cancel("q2", reminder) == {reminder: "cancelled"}
    assert desk.bodies() == ["0", "3"]
    assert read_entries(desk.client, desk.layout, limit=100) == []
    with pytest.raises(PartialFailureError):
        app.cancel("q", last, reason="too late")
    assert [entry.reason for entry in desk.audit("cancel")] == ["too late"]


def test_calls_outlast_short_losses_of_the_connection(app: qdo.App, desk: OperatorDesk) -> None:
    app.send("q", 0)
    desk.work()
    desk.wait_for(0)
    app.pause("q", timeout_seconds=30)
    cut = partial(app._locks.get().connection.client.drop_connection, "the test cuts it")
    moments = random.Random(7)
    for number in range(1, 16):
        id = app.send("q", number)
        cutter = threading.Timer(moments.uniform(0.0, 0.1), cut)
        cutter.start()
        assert set(app.cancel("q", id, timeout_seconds=30)) == {id}
        cutter.join()


def test_failing_messages_are_decided(app: qdo.App, desk: OperatorDesk) -> None:
    (desk.folder / "fail-1").touch()
    (desk.folder / "fail-2").touch()
    ids = [app.send("q", each) for each in (1, 2, 3)]
    desk.work(policy=qdo.Policy(attempts=1, then="block"))
    wait_until(lambda: bool(app.peek("q", kind="blocking")), "the block", 60.0)
    (blocking,) = app.peek("q", kind="blocking")
    assert (blocking.id, blocking.body) == (ids[0], b"1")
    with pytest.raises(PartialFailureError):
        app.cancel("q", *ids[:2], str(blocking.position))
    with pytest.raises(MessageNotFailingError):
        app.skip("q", ids[2])
    (desk.folder / "fail-1").unlink()
    assert app.retry_now("q") == [ids[0]]
    desk.wait_for(3)
    assert desk.runs("q") == [("1", 1), ("1", 1), ("3", 1)]
    with pytest.raises(NotFailingError):
        app.retry_now("q", every=True)
    desk.hold(4)
    running = app.send("q", 4)
    desk.wait_for(4)
    assert app.skip("q", running) == [running]
    desk.wait_done()


def test_queues_pause_and_resume(app: qdo.App, desk: OperatorDesk) -> None:
    """Also in a thread of a worker process, whose jobs run on another event loop."""
    with pytest.raises(NotFoundError):
        app.pause("q*", timeout_seconds=30)
    app.pause("q*", reason="repair", allow_none=True, timeout_seconds=30)
    desk.send(1)
    desk.work()
    wait_until(lambda: desk.items("queues", "q")[0]["held"] is not None, "the pause", 60.0)
    assert desk.bodies() == []
    with pytest.raises(NotFoundError):
        app.resume("other")
    thread = threading.Thread(target=app.resume, args=("q*",))
    thread.start()
    desk.wait_for(1)
    thread.join()
