"""Where a job may run: bad use is refused when it is registered or at start, with the remedy."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from qdo.app import App
from qdo.errors import UsageError
from qdo.message import Message
from qdo.placement import is_async, kind_of
from qdo.settings import Settings
from qdo.worker.executors.choice import Executors


def plain(message: Message, context: Any) -> None: ...


async def coroutine(message: Message, context: Any) -> None: ...


class Asynchronous:
    async def __call__(self, message: Message, context: Any) -> None: ...


@pytest.fixture
def app() -> App:
    return App("test")


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (plain, {"executor": "fork"}, "executor='fork' is none of greenlet, thread, process"),
        (coroutine, {"executor": "thread"}, "leave executor out, or write it with 'def'"),
        (coroutine, {"executor": "process"}, "leave executor out, or write it with 'def'"),
        (coroutine, {"executor": "greenlet"}, "leave executor out, or write it with 'def'"),
        (Asynchronous(), {"executor": "process"}, "leave executor out"),
        (coroutine, {"recycle_after": 5}, "add executor='process', or leave recycle_after out"),
        (plain, {"executor": "thread", "memory_mib": 500}, "or leave memory_mib out"),
        (plain, {"executor": "greenlet", "recycle_after": 5}, "add executor='process'"),
        (plain, {"timeout_seconds": 0}, "timeout_seconds=0 must be a number of at least 0.001"),
        (plain, {"timeout_seconds": -1.5}, "timeout_seconds=-1.5 must be"),
        (plain, {"timeout_seconds": float("nan")}, "timeout_seconds=nan must be"),
        (plain, {"timeout_seconds": "5"}, "timeout_seconds='5' must be"),
        (plain, {"timeout_seconds": True}, "timeout_seconds=True must be"),
        (plain, {"executor": "process", "memory_mib": 8}, "memory_mib=8 must be .* at least 32"),
        (plain, {"executor": "process", "memory_mib": 64.5}, "must be a whole number"),
        (plain, {"executor": "process", "recycle_after": 0}, "recycle_after=0 must be"),
    ],
)
def test_contradictions_are_refused(
    app: App, function: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        app.job(**options)(function)
    assert app.jobs == ()


def test_what_runs_where(app: App) -> None:
    """Coroutine functions choose their executor; others take the job's word, then the setting's."""
    app.job("a")(coroutine)
    app.job("b")(Asynchronous())
    app.job("c")(functools.partial(coroutine))
    app.job("d")(plain)
    app.job("e", executor="thread")(plain)
    jobs = {job.queues: job for job in app.jobs}
    found = {queues: kind_of(job, "process") for queues, job in jobs.items()}
    assert found == dict(zip("abcde", ["asyncio"] * 3 + ["process", "thread"], strict=True))
    assert not is_async(plain)


def test_process_options_need_the_process_executor_by_setting_too(app: App) -> None:
    """Which executor a setting chooses is known only at start."""
    app.job(memory_mib=100)(plain)
    with pytest.raises(UsageError, match="memory_mib needs a process of its own"):
        Executors(Settings(app="test"), "m:app", lambda message: True).check(app.jobs)
    settings = Settings(app="test", executor="process")
    Executors(settings, "m:app", lambda message: True).check(app.jobs)
    with pytest.raises(UsageError, match="run it with `qdo-worker MODULE:APP`"):
        Executors(settings, None, lambda message: True).check(app.jobs)


def test_memory_is_watched_where_it_can_be_seen(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.job(executor="process", memory_mib=100)(plain)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    with pytest.raises(UsageError, match="leave it out, or run the worker on Linux"):
        Executors(Settings(app="test"), "m:app", lambda message: True).check(app.jobs)
