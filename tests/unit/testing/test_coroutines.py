"""The kit in tests that are coroutines, and while code of a test waits for a result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import qdo
from qdo.errors import RequestTimeoutError, UsageError
from qdo.testing import TestKit


@pytest.fixture
def app() -> qdo.App:
    app = qdo.App("kit")
    left: list[str] = []

    @app.context
    async def context() -> AsyncIterator[list[str]]:
        yield left
        left.append("left")

    @app.job("sums", pool=True)
    async def add(request: qdo.Request, context: list[str]) -> int:
        if request.attempt == 1:
            raise ValueError("once")
        return sum(request.body)

    @app.job("q")
    async def job(message: qdo.Message, context: list[str]) -> None: ...

    return app


def test_a_coroutine_runs_the_kit(app: qdo.App) -> None:
    async def main() -> None:
        async with TestKit(app) as kit:
            await app.asend("q", 1)
            kit.send("q", 2, delay_seconds=60)
            with pytest.raises(UsageError):
                kit.run_until_idle()
            await kit.arun_until_idle()
            assert kit.done() == [1]
            await kit.aadvance(59)
            assert await kit.arun_until_settled() == pytest.approx(1)
            assert kit.done() == [1, 2]
            for plain in (kit.hand_over, kit.lose_lease):
                with pytest.raises(UsageError):
                    plain()
            await kit.ahand_over()
            await kit.arun_until_idle()
            await kit.alose_lease()
            assert await kit.adeliver("/unknown", 1) == 404

    asyncio.run(main())


def test_a_coroutine_that_awaits_a_result_runs_the_kit(app: qdo.App) -> None:
    """As an endpoint does: nobody else would run its request, and the retry after a backoff."""

    async def endpoint(number: int) -> Any:
        handle = await app.arequest("sums", [number, 1])
        return await handle.aresult(timeout_seconds=60)

    async def main() -> list[Any]:
        return await asyncio.gather(*map(endpoint, range(5)))

    with TestKit(app):
        assert asyncio.run(main()) == [1, 2, 3, 4, 5]
        assert app.request("sums", [3, 4]).result(timeout_seconds=60) == 7


def test_a_result_that_cannot_arrive_is_an_error(app: qdo.App) -> None:
    with TestKit(app) as kit:
        handle = app.request("other", 1)
        app.send("q", 1, delay_seconds=60)
        with pytest.raises(UsageError):
            handle.result(timeout_seconds=60)
        with pytest.raises(RequestTimeoutError):
            asyncio.run(handle.aresult(timeout_seconds=0.05))
        assert handle.state == "waiting"
        assert kit.done() == [1]
        handle.cancel()
