"""Middleware: checked when it is registered, composed once, free if there is none."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from qdo import App, Message
from qdo.errors import UsageError
from qdo.jobs.middleware import Middleware, unchecked
from qdo.worker.executors.router import GreenletExecutor

MESSAGE = Message("q", 1, None)


@pytest.fixture
def app() -> App:
    return App("mail")


def plain(message: Message, context: Any) -> None: ...


async def asynchronous(message: Message, context: Any) -> None: ...


def around(call_next: Callable[..., Any], message: Message, context: Any) -> None:
    call_next(message, context)


async def async_around(call_next: Callable[..., Any], message: Message, context: Any) -> None:
    await call_next(message, context)


# --- composing ------------------------------------------------------------------------


def test_the_first_registered_is_outermost(app: App) -> None:
    """Each runs before and after the ones inside it."""
    steps: list[str] = []

    def note(name: str) -> None:
        @app.middleware
        def noting(call_next: Callable[..., Any], message: Message, context: Any) -> None:
            steps.append(f"{name} before")
            call_next(message, context)
            steps.append(f"{name} after")

    note("one")
    note("two")

    @app.job()
    def job(message: Message, context: Any) -> None:
        steps.append(f"job {message.queue} {context}")

    app.hooks.composed(app.jobs[0]).function(MESSAGE, "context")
    assert steps == ["one before", "two before", "job q context", "two after", "one after"]


def test_the_first_registered_is_outermost_of_coroutines(app: App) -> None:
    """The same holds on the asyncio loop."""
    steps: list[str] = []

    def note(name: str) -> None:
        @app.middleware()
        async def noting(call_next: Callable[..., Any], message: Message, context: Any) -> None:
            steps.append(name)
            await call_next(message, context)
            steps.append(name)

    note("one")
    note("two")

    @app.job()
    async def job(message: Message, context: Any) -> None:
        await asyncio.sleep(0)
        steps.append("job")

    asyncio.run(app.hooks.composed(app.jobs[0]).function(MESSAGE, None))
    assert steps == ["one", "two", "job", "two", "one"]


def test_errors_name_the_job_and_not_what_is_around_it(app: App) -> None:
    """Logs and dead letters speak of the function that the app's developer knows."""
    app.middleware(around)
    app.job("a")(plain)
    app.job("b")(functools.partial(plain))
    assert len(app.jobs) == 2
    for job in app.jobs:
        assert app.hooks.composed(job).name == job.name


def test_middleware_decides_whether_the_job_runs_and_with_what(app: App) -> None:
    """It may leave the job out, and give it another context."""
    given: list[Any] = []

    @app.middleware
    def choose(call_next: Callable[..., Any], message: Message, context: Any) -> None:
        if message.queue == "q":
            call_next(message, {"tenant": message.queue})

    app.job()(lambda message, context: given.append(context))
    whole = app.hooks.composed(app.jobs[0]).function
    whole(MESSAGE, None)
    whole(Message("other", 1, None), None)
    assert given == [{"tenant": "q"}]


def test_middleware_sees_what_the_job_raises(app: App) -> None:
    """It may pass an error on, or raise another one."""

    @app.middleware
    def translate(call_next: Callable[..., Any], message: Message, context: Any) -> None:
        try:
            call_next(message, context)
        except KeyError as error:
            raise ValueError("translated") from error

    @app.job()
    def job(message: Message, context: Any) -> None:
        raise KeyError("x")

    with pytest.raises(ValueError, match="translated"):
        app.hooks.composed(app.jobs[0]).function(MESSAGE, None)


def test_a_forgotten_await_does_not_pass_for_done(app: App) -> None:
    """Without it the job would never run and its message be done all the same."""

    @app.middleware
    async def forgetful(call_next: Callable[..., Any], message: Message, context: Any) -> None:
        call_next(message, context)

    app.job()(asynchronous)
    with pytest.raises(UsageError, match=r"forgetful .*await call_next"):
        asyncio.run(app.hooks.composed(app.jobs[0]).function(MESSAGE, None))


def test_jobs_of_both_kinds_each_have_their_own(app: App) -> None:
    """`jobs` selects the kind of jobs for a middleware."""
    app.middleware(jobs="sync")(around)
    app.middleware(jobs="async")(async_around)
    app.job("a")(plain)
    app.job("b")(asynchronous)
    found = {job.queues: app.hooks.composed(job).function for job in app.jobs}
    assert found["a"](MESSAGE, None) is None
    assert asyncio.run(found["b"](MESSAGE, None)) is None


def test_a_job_without_middleware_pays_nothing(app: App) -> None:
    """Middleware of the other kind is left out when the call is made, not at each message."""
    app.middleware(jobs="async")(async_around)
    app.job("a")(plain)
    app.job("b")(asynchronous)
    first, second = (app.hooks.composed(job).function for job in app.jobs)
    assert unchecked(GreenletExecutor().bind(app.hooks.composed(app.jobs[0]))) is plain
    assert unchecked(first) is plain
    assert unchecked(second) is second


def test_the_job_starts_only_if_it_may_after_its_middleware(app: App) -> None:
    """Middleware may wait for long; without any, executors have just asked."""
    steps: list[str] = []

    def refuse(message: object) -> None:
        if message is MESSAGE and steps:
            raise LookupError
        steps.append("asked")

    app.middleware(jobs="sync")(lambda call_next, message, context: call_next(message, context))
    app.job("a")(lambda message, context: steps.append("job"))
    app.job("b")(asynchronous)
    with pytest.raises(LookupError):
        app.hooks.composed(app.jobs[0], refuse).function(MESSAGE, None)
    assert asyncio.run(app.hooks.composed(app.jobs[1], refuse).function(MESSAGE, None)) is None
    assert steps == ["asked"]


# --- rejections -----------------------------------------------------------------------


def too_few(call_next: Callable[..., Any], message: Message) -> None: ...


def generator(call_next: Callable[..., Any], message: Message, context: Any) -> Any:
    yield


async def async_generator(call_next: Callable[..., Any], message: Message, context: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (too_few, r"def too_few\(call_next, message, context\)"),
        (generator, "generator.*'yield'"),
        (async_generator, "async_generator.*'yield'"),
        ("text", "'text'"),
    ],
)
def test_functions_that_can_be_no_middleware(app: App, function: Any, reason: str) -> None:
    """They are rejected at registration, with the remedy."""
    with pytest.raises(UsageError, match=reason):
        app.middleware(function)


@pytest.mark.parametrize(
    ("middleware", "job", "reason"),
    [
        (
            async_around,
            plain,
            r"async_around.*:plain.*@app.middleware\(jobs='async'\)",
        ),
        (
            around,
            asynchronous,
            r"around.*:asynchronous.*@app.middleware\(jobs='sync'\)",
        ),
    ],
)
def test_kinds_must_agree_whichever_comes_first(middleware: Any, job: Any, reason: str) -> None:
    """An `async def` middleware cannot run around a `def` job, and vice versa."""
    first, second = App("first"), App("second")
    first.middleware(middleware)
    with pytest.raises(UsageError, match=reason):
        first.job()(job)
    assert first.jobs == ()
    second.job()(job)
    with pytest.raises(UsageError, match=reason):
        second.middleware(middleware)
    second.middleware(jobs="async" if middleware is async_around else "sync")(middleware)


def test_jobs_must_be_the_middlewares_own_kind() -> None:
    """Otherwise it would be for jobs that it cannot run around."""
    with pytest.raises(UsageError, match="'async def'"):
        Middleware(around, "async")
    with pytest.raises(UsageError, match="'def'"):
        Middleware(async_around, "sync")
    with pytest.raises(UsageError, match="'asyncio'"):
        Middleware(around, "asyncio")  # type: ignore[arg-type]
