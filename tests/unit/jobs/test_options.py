"""Where a job may run: invalid use is rejected at registration or at startup."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from qdo.app import App
from qdo.callables import is_async
from qdo.errors import UsageError
from qdo.jobs.options import kind_of
from qdo.jobs.retry import Policy
from qdo.message import Message
from qdo.settings.settings import Settings
from qdo.worker.executors.router import ExecutorRouter


def plain(message: Message, context: Any) -> None: ...


async def coroutine(message: Message, context: Any) -> None: ...


class Asynchronous:
    async def __call__(self, message: Message, context: Any) -> None: ...


@pytest.fixture
def app() -> App:
    return App("test")


@pytest.mark.parametrize(
    ("function", "options", "option"),
    [
        (plain, {"executor": "fork"}, "executor"),
        (coroutine, {"executor": "thread"}, "async def"),
        (coroutine, {"executor": "process"}, "async def"),
        (coroutine, {"executor": "greenlet"}, "async def"),
        (Asynchronous(), {"executor": "process"}, "async def"),
        (coroutine, {"recycle_after": 5}, "recycle_after"),
        (plain, {"executor": "thread", "memory_mib": 500}, "memory_mib"),
        (plain, {"executor": "greenlet", "recycle_after": 5}, "recycle_after"),
        (plain, {"timeout_seconds": 0}, "timeout_seconds"),
        (plain, {"timeout_seconds": -1.5}, "timeout_seconds"),
        (plain, {"timeout_seconds": float("nan")}, "timeout_seconds"),
        (plain, {"timeout_seconds": float("inf")}, "timeout_seconds"),
        (plain, {"timeout_seconds": 1e300}, "timeout_seconds"),
        (plain, {"timeout_seconds": 10**400}, "timeout_seconds"),
        (plain, {"timeout_seconds": "5"}, "timeout_seconds"),
        (plain, {"timeout_seconds": True}, "timeout_seconds"),
        (plain, {"executor": "process", "memory_mib": 8}, "memory_mib .* 32"),
        (plain, {"executor": "process", "memory_mib": 64.5}, "memory_mib"),
        (plain, {"executor": "process", "recycle_after": 0}, "recycle_after"),
        (plain, {"order": "kye"}, "queue, key, none"),
        (plain, {"order": "key", "concurrency": 0}, "concurrency"),
        (plain, {"order": "key", "concurrency": True}, "concurrency"),
        (plain, {"concurrency": 5}, "order='key'"),
        (plain, {"order": "key", "checkpoint": "message"}, "checkpoint='message'"),
        (plain, {"order": "priority", "checkpoint": "message"}, "checkpoint='message'"),
        (plain, {"order": "priority", "concurrency": 2}, "concurrency=2"),
        (plain, {"order": "priority", "batch": 2}, "batch=2"),
        (plain, {"order": "none", "policy": Policy(then="block")}, "block"),
        (plain, {"batch": 0}, "batch"),
        (plain, {"batch": 2.5}, "batch"),
        (plain, {"batch_wait_seconds": 1}, "batch="),
        (plain, {"batch": 10, "batch_wait_seconds": -1}, "3600"),
        (plain, {"batch": 10, "order": "key"}, "order"),
        (plain, {"batch": 10, "executor": "process"}, "executor='thread'"),
        (plain, {"policy": "block"}, r"qdo\.Policy"),
        (plain, {"pool": True, "order": "key"}, "omit order"),
        (plain, {"pool": True, "checkpoint": "message"}, "omit checkpoint"),
        (plain, {"pool": True, "policy": Policy(then="block")}, "omit then='block'"),
        (lambda batch, context: None, {"pool": True, "batch": 9}, "omit batch"),
    ],
)
def test_rejects_contradictory_options(
    app: App, function: Any, options: dict[str, Any], option: str
) -> None:
    with pytest.raises(UsageError, match=option):
        app.job(**options)(function)
    assert app.jobs == ()


def test_what_runs_where(app: App) -> None:
    """Coroutine functions run on asyncio; others use the job's executor, else the setting's."""
    app.job("a")(coroutine)
    app.job("b")(Asynchronous())
    app.job("c")(functools.partial(coroutine))
    app.job("d")(plain)
    app.job("e", executor="thread")(plain)
    jobs = {job.queues: job for job in app.jobs}
    found = {queues: kind_of(job, "process") for queues, job in jobs.items()}
    assert found == dict(zip("abcde", ["asyncio"] * 3 + ["process", "thread"], strict=True))
    assert not is_async(plain)


def test_process_options_need_the_process_executor_as_setting(app: App) -> None:
    """The setting's executor is known only at startup."""
    app.job(memory_mib=100)(plain)
    with pytest.raises(UsageError, match="memory_mib"):
        ExecutorRouter(Settings(app="test"), "m:app", lambda message: True).check(app.jobs)
    settings = Settings(app="test", executor="process")
    ExecutorRouter(settings, "m:app", lambda message: True).check(app.jobs)
    with pytest.raises(UsageError, match="MODULE:APP"):
        ExecutorRouter(settings, None, lambda message: True).check(app.jobs)


def test_memory_is_watched_where_it_can_be_seen(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.job(executor="process", memory_mib=100)(plain)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    with pytest.raises(UsageError, match="Linux"):
        ExecutorRouter(Settings(app="test"), "m:app", lambda message: True).check(app.jobs)
