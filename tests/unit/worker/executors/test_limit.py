"""The limit of `max_messages`: when it is reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest

from qdo import App
from qdo.message import Message
from qdo.worker.executors.aio import AsyncioExecutor
from qdo.worker.executors.base import Executor, NotStarted
from qdo.worker.executors.router import LimitedExecutor
from qdo.worker.executors.thread import ThreadExecutor
from tests.support.engine import until


def message_of(number: int) -> Message:
    return Message("q", number, number)


@pytest.mark.parametrize("make", [ThreadExecutor, AsyncioExecutor])
def test_the_limit_is_reached_when_all_jobs_have_started(
    make: Callable[[Callable[[Message], bool]], Executor],
) -> None:
    """A drain refuses what has not started yet, so it must not begin before."""
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
