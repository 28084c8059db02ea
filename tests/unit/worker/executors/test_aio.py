"""Coroutines on the asyncio loop of a worker."""

from __future__ import annotations

from typing import Any

import gevent
import pytest

from qdo import App
from qdo.message import Message
from qdo.system.native import native_lock
from qdo.worker.executors.aio import AsyncioExecutor
from qdo.worker.executors.base import JobAborted
from tests.support.engine import until

PATIENCE_SECONDS = 20.0


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
