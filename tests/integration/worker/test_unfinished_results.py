"""Jobs that return work instead of doing it: their messages are never done."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.message import Message
from tests.support.engine import EngineSetup, until

Function = Callable[..., Any]
RAN: list[Any] = []


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    RAN.clear()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineSetup]:
    made = EngineSetup(tmp_path, attempts=1)
    yield made
    made.close()


async def coroutine(message: Message, context: Any) -> None:
    RAN.append(message)


def generator(message: Message, context: Any) -> Iterator[None]:
    RAN.append(message)
    yield


async def async_generator(message: Message, context: Any) -> Any:
    RAN.append(message)
    yield


class CallableJob:
    """An object whose call is not known to return a generator."""

    def __call__(self, *arguments: Any) -> Any:
        return generator(*arguments)


class Promise:
    """An object that does its work once it is awaited."""

    def __await__(self) -> Iterator[None]:
        RAN.append(self)
        yield


def decorated(function: Function) -> Function:
    """Decorate without a trace of the function."""
    return lambda *arguments: function(*arguments)


def wrapped(function: Function) -> Function:
    """Decorate as `functools.wraps` does."""
    return functools.wraps(function)(decorated(function))


async def nested(message: Message, context: Any) -> Any:
    return coroutine(message, context)


async def task(message: Message, context: Any) -> Any:
    return asyncio.get_running_loop().create_task(asyncio.sleep(60))


FORMS: dict[str, Function] = {
    "decorated coroutine": decorated(coroutine),
    "decorated generator": decorated(generator),
    "decorated async generator": decorated(async_generator),
    "wrapped coroutine": wrapped(coroutine),
    "wrapped generator": wrapped(generator),
    "partial of a lambda": functools.partial(lambda context, message, _: coroutine(message, _), {}),
    "object": CallableJob(),
    "awaitable": lambda message, context: Promise(),
    "coroutine of a coroutine": nested,
    "task of a coroutine": task,
}
SYNC = {name: each for name, each in FORMS.items() if not name.endswith("of a coroutine")}


def refused(engine: EngineSetup) -> None:
    """Send messages, and wait until all are dead letters whose job has not run."""
    engine.send("q", 1, 2)
    engine.start("q")
    until(lambda: len(engine.broker.dead_letters.records()) == 2)
    for letter in engine.broker.dead_letters.records():
        assert letter.error.startswith("UsageError: ")
        assert "an unfinished " in letter.error
    assert RAN == []
    assert engine.pipeline.counters.processed == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"timeout_seconds": 60}, {"order": "key"}], ids=str)
def test_work_that_a_job_returns_is_a_failure(
    engine: EngineSetup, form: str, options: dict[str, Any]
) -> None:
    engine.app.job("q", **options)(FORMS[form])
    refused(engine)


@pytest.mark.parametrize("form", SYNC)
@pytest.mark.parametrize("options", [{"executor": "thread"}, {"batch": 2}], ids=str)
def test_so_it_is_in_threads_and_of_batches(
    engine: EngineSetup, form: str, options: dict[str, Any]
) -> None:
    engine.app.job("q", **options)(SYNC[form])
    refused(engine)


def test_middleware_and_observers_hide_no_unfinished_job(engine: EngineSetup) -> None:
    @engine.app.middleware(jobs="sync")
    def around(call_next: Function, message: Message, context: Any) -> None:
        call_next(message, context)

    engine.app.observer(lambda event: None)
    engine.app.job("q")(decorated(coroutine))
    refused(engine)


def test_asynchronous_middleware_hides_none_either(engine: EngineSetup) -> None:
    @engine.app.middleware(jobs="async")
    async def around(call_next: Function, message: Message, context: Any) -> None:
        await call_next(message, context)

    engine.app.job("q")(nested)
    refused(engine)


def test_unfinished_middleware_is_a_failure(engine: EngineSetup) -> None:
    """Its job has not run."""

    async def around(call_next: Function, message: Message, context: Any) -> None:
        call_next(message, context)

    engine.app.middleware(jobs="sync")(decorated(around))
    engine.app.job("q")(lambda message, context: RAN.append(message))
    refused(engine)


def test_other_results_are_ignored(engine: EngineSetup) -> None:
    results = [True, 0, "text", {}, [1], iter([1]), object(), engine]
    engine.app.job("q")(lambda message, context: results[message.body])
    engine.send("q", *range(len(results)))
    engine.start("q")
    until(lambda: engine.pipeline.counters.processed == len(results))
    assert engine.broker.dead_letters.records() == []


def test_unfinished_hooks_are_logged(engine: EngineSetup, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the alert of a failure is never sent, and no line says so."""
    engine.app.observer(lambda event: coroutine(event, None))  # type: ignore[arg-type]
    engine.app.failure(lambda message, context, error: coroutine(message, context))
    engine.app.job("q")(lambda message, context: 1 / 0)
    engine.send("q", 1)
    engine.start("q")
    until(lambda: engine.broker.dead_letters.records())
    errors = [str(each.exc_info[1]) for each in caplog.records if each.exc_info]
    assert sum("an unfinished coroutine" in each for each in errors) == 2
