"""When jobs in threads and coroutines have started, and which have not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest

from qdo import App
from qdo.message import Message
from qdo.system.native import native_lock
from qdo.worker.executors.aio import AsyncioExecutor
from qdo.worker.executors.base import Executor, JobAborted, NotStarted
from qdo.worker.executors.router import LimitedExecutor
from qdo.worker.executors.thread import ThreadExecutor
from tests.support.engine import until

PATIENCE_SECONDS = 20.0


def message_of(number: int) -> Message:
    return Message("q", number, number)


@pytest.mark.parametrize("make", [ThreadExecutor, AsyncioExecutor])
def test_the_limit_is_reached_when_all_jobs_have_started(
    make: Callable[[Callable[[Message], bool]], Executor],
) -> None:
    """That of `max_messages`. A drain refuses what has not started yet: it begins behind it."""
    ran: list[Any] = []
    reached: list[int] = []
    app = App("test")

    if make is ThreadExecutor:

        @app.job()
        def job(message: Message, context: Any) -> None:
            ran.append(message.body)

    else:

        @app.job()
        async def job(message: Message, context: Any) -> None:
            ran.append(message.body)

    inner = make(lambda message: not reached)
    executor = LimitedExecutor(inner, 3, lambda: reached.append(len(ran)))
    call = executor.bind(app.jobs[0])
    gevent.joinall([gevent.spawn(call, message_of(n), None) for n in range(3)], raise_error=True)
    until(lambda: reached, "the limit")
    assert sorted(ran) == [0, 1, 2]
    with pytest.raises(NotStarted):
        call(message_of(4), None)
    assert len(reached) == 1
    executor.close()


def test_a_job_that_is_aborted_before_it_begins_ends() -> None:
    """The loop is busy meanwhile, so it gets start and interruption at the same time."""
    seen: list[Any] = []
    release = native_lock()
    release.acquire()
    app = App("test")

    @app.job()
    async def job(message: Message, context: Any) -> None:
        seen.append(message.body)
        if message.body == "blocks":
            release.acquire()

    executor = AsyncioExecutor(lambda message: True)
    call = executor.bind(app.jobs[0])
    blocking = gevent.spawn(call, Message("q", 1, "blocks"), None)
    until(lambda: seen, "the job that blocks the loop")
    waiting = gevent.spawn(call, Message("q", 2, "waits"), None)
    until(lambda: executor.under_way() == 2, "the call of the other one")
    waiting.kill(JobAborted, block=False)
    gevent.sleep(0)
    release.release()
    gevent.joinall([blocking, waiting], timeout=PATIENCE_SECONDS)
    with pytest.raises(JobAborted):
        waiting.get(block=False)
    assert blocking.successful()
    assert seen == ["blocks"]
    executor.close()
