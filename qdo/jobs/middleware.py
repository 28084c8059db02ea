"""Middleware and hooks, which are the app's code around the call of every job.

A middleware is a function ``(call_next, message, context)``. The function runs the next middleware,
or the job, with ``call_next(message, context)``. ``def`` jobs need ``def`` middleware, and ``async
def`` jobs need ``async def`` middleware, because neither kind can wait for the other.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from qdo.callables import (
    check_call,
    check_done,
    check_hook,
    describe_callable,
    is_async,
)
from qdo.errors import UsageError
from qdo.jobs.job import Job
from qdo.message import Message
from qdo.outcomes import Event

# The jobs of a middleware: all jobs, only ``def`` jobs, or only ``async def`` jobs.
Around = Literal["all", "sync", "async"]
# A function that is called as ``function(call_next, message, context)``, and whose result is
# ignored.
MiddlewareFunction = Callable[[Callable[[Any, Any], Any], Any, Any], Any]
AsyncMiddlewareFunction = Callable[[Callable[[Any, Any], Awaitable[Any]], Any, Any], Awaitable[Any]]
CheckStart = Callable[[Any], object]
ContextFactory = Callable[[], AbstractContextManager[Any]]
# A function of an app that returns a context manager, or a generator function.
ContextSource = Callable[
    [],
    AbstractContextManager[Any]
    | Iterator[Any]
    | AbstractAsyncContextManager[Any]
    | AsyncIterator[Any],
]
# The worker awaits coroutines on the loop of async jobs.
FailureHook = Callable[[Message, Any, BaseException], Awaitable[None] | None]
Observer = Callable[[Event], Awaitable[None] | None]
Wait = Callable[[Awaitable[Any]], Any]


@dataclass(frozen=True, slots=True)
class Middleware:
    """A registered middleware.

    The constructor raises UsageError if the function does not fit `jobs`.
    """

    function: MiddlewareFunction
    jobs: Around = "all"

    def __post_init__(self) -> None:
        if self.jobs not in get_args(Around):
            raise UsageError(
                reason=f"jobs must be one of {', '.join(get_args(Around))}, got {self.jobs!r}; it "
                "selects the jobs that a middleware runs around"
            )
        check_hook(
            self.function, ("call_next", "message", "context"), "middleware", may_be_async=True
        )
        if self.jobs != "all" and (self.jobs == "async") != is_async(self.function):
            raise UsageError(
                reason=f"middleware {describe_callable(self.function)} with jobs={self.jobs!r} "
                f"must be written with '{_keyword(self.jobs == 'async')}'"
            )

    def check_job(self, function: Callable[..., Any]) -> None:
        """Raise UsageError, with the remedy, if the middleware cannot run around this job."""
        if self.jobs != "all" or is_async(function) == is_async(self.function):
            return
        own = is_async(self.function)
        only = "async" if own else "sync"
        raise UsageError(
            reason=f"middleware {describe_callable(self.function)} is '{_keyword(own)}' and cannot "
            f"run around job {describe_callable(function)}, which is '{_keyword(not own)}'; "
            f"write it with '{_keyword(not own)}', or exclude such jobs with "
            f"@app.middleware(jobs={only!r})"
        )

    def is_for(self, function: Callable[..., Any]) -> bool:
        """Return whether the middleware runs around a job."""
        return self.jobs == "all" or (self.jobs == "async") == is_async(function)


def compose(
    function: Callable[..., Any],
    registered: Sequence[Middleware],
    check_start: CheckStart = lambda message: None,
) -> Callable[[Any, Any], Any]:
    """Return a job's function inside its middleware. The first registered middleware is outermost.

    A call raises UsageError if the job or a middleware returns unfinished work, such as a
    coroutine.

    :param check_start: a function to call with the message before the middleware, and again before
        the job, because middleware may wait for a long time. It raises an error if the job must not
        start anymore.
    """
    wrap = _wrap_async if is_async(function) else _wrap
    whole = _finish_async if is_async(function) else _finish
    around = [each.function for each in registered if each.is_for(function)]
    call = whole(function)
    if around:
        check = (_check_async if is_async(function) else _check)(check_start)
        around = [check, *around, check]
    for middleware in reversed(around):
        call = wrap(middleware, call)
    # Errors and logs name the job, not its middleware.
    call = functools.update_wrapper(call, function)
    if not around:
        call.unchecked = function  # type: ignore[attr-defined]
    return call


def unchecked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a composed function. Without middleware, omit the check of its result."""
    return getattr(call, "unchecked", call)


def _check(check_start: CheckStart) -> MiddlewareFunction:
    def check(call_next: Callable[[Any, Any], Any], message: Any, context: Any) -> None:
        check_start(message)
        call_next(message, context)

    return check


def _check_async(check_start: CheckStart) -> MiddlewareFunction:
    async def check(call_next: Callable[[Any, Any], Any], message: Any, context: Any) -> None:
        check_start(message)
        await call_next(message, context)

    return check


def _finish(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def call(message: Any, context: Any) -> None:
        result = function(message, context)
        if result is not None:
            check_done(result, function, "job")

    return call


def _finish_async(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    async def call(message: Any, context: Any) -> None:
        check_done(await function(message, context), function, "job")

    return call


def _wrap(middleware: MiddlewareFunction, inner: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def call(message: Any, context: Any) -> None:
        check_done(middleware(inner, message, context), middleware, "middleware")

    return call


def _wrap_async(
    middleware: MiddlewareFunction, inner: Callable[..., Any]
) -> Callable[[Any, Any], Any]:
    name = describe_callable(middleware)

    async def call(message: Any, context: Any) -> None:
        calls: list[Awaitable[Any]] = []

        def call_next(message: Any, context: Any) -> Awaitable[Any]:
            calls.append(inner(message, context))
            return calls[-1]

        result = await middleware(call_next, message, context)
        for each in calls:
            # Otherwise the message would be done although its job has not run.
            if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == "CORO_CREATED":
                each.close()
                raise UsageError(
                    reason=f"middleware {name} called call_next without waiting for it; write "
                    "await call_next(message, context)"
                )
        check_done(result, middleware, "middleware")

    return call


def _keyword(asynchronous: bool) -> str:
    return "async def" if asynchronous else "def"


class Hooks:
    """The registered hooks of one app.

    :ivar job_context: a function that returns the context manager of a worker. The default yields
        an empty dict.
    :ivar observers: functions to call with an event for each attempt, in the order of registration.
    :ivar middleware: the app's middleware, the outermost first. `own_middleware` is qdo's
        middleware, which runs around the app's middleware.
    """

    def __init__(self, app: str) -> None:
        self._app = app
        self.on_loop = False
        """Whether a hook is async."""
        self.wait: Wait = _refuse
        """Runs a coroutine on the loop of async jobs, and waits for its result; workers set it."""
        self.job_context: ContextFactory = _empty_context
        self.job_failure: FailureHook = _ignore_failure
        self.observers: list[Observer] = []
        self.middleware: list[Middleware] = []
        self.own_middleware: list[Middleware] = []

    def add_context(self, factory: ContextSource) -> None:
        if self.job_context is not _empty_context:
            raise self._already("job_context", "write one that yields the resources of both")
        self.replace_context(factory)

    def replace_context(self, factory: ContextSource) -> None:
        """Replace the app's `job_context` with a function."""
        check_call(factory, (), "job_context")
        if is_async(factory):
            raise UsageError(
                reason=f"job_context {describe_callable(factory)} must be a generator or return a "
                "context manager, got a coroutine function; write 'yield' instead of 'return'"
            )
        if inspect.isgeneratorfunction(factory):
            self.job_context = contextlib.contextmanager(factory)
        elif inspect.isasyncgenfunction(factory):
            self.on_loop = True
            self.job_context = self._checked(contextlib.asynccontextmanager(factory))
        else:
            self.job_context = self._checked(factory)

    def add_failure(self, hook: FailureHook) -> None:
        if self.job_failure is not _ignore_failure:
            raise self._already("job_failure", "call one from the other")
        self.replace_failure(hook)

    def replace_failure(self, hook: FailureHook) -> None:
        """Replace the app's `job_failure` with a function."""
        check_hook(hook, ("message", "context", "error"), "job_failure", may_be_async=True)
        self.job_failure = self._awaited(hook)

    def add_observer(self, hook: Observer) -> None:
        check_hook(hook, ("event",), "observer", may_be_async=True)
        self.observers.append(self._awaited(hook))

    def _awaited(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that waits for its coroutine, if it is async."""
        if not is_async(hook):
            return hook
        self.on_loop = True

        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            return self.wait(hook(*args))

        return call

    def _checked(self, factory: Callable[..., Any]) -> ContextFactory:
        """Return a factory that checks whether it has made a context manager."""

        def make() -> AbstractContextManager[Any]:
            manager: Any = factory()
            if hasattr(type(manager), "__enter__") and hasattr(type(manager), "__exit__"):
                plain: AbstractContextManager[Any] = manager
                return plain
            if hasattr(type(manager), "__aenter__") and hasattr(type(manager), "__aexit__"):
                return AwaitedContext(manager, self.wait)
            raise UsageError(
                reason=f"job_context {describe_callable(factory)} must return a context manager, "
                f"got an object of type {type(manager).__name__}; write 'yield' instead of "
                "'return', and the cleanup after it"
            )

        return make

    def composed(self, job: Job, check_start: CheckStart = lambda message: None) -> Job:
        """Return a job whose function includes the middleware (see `compose`)."""
        registered = [*self.own_middleware, *self.middleware]
        function = compose(job.function, registered, check_start)
        return replace(job, function=function)

    def _already(self, hook: str, remedy: str) -> UsageError:
        return UsageError(reason=f"app {self._app!r} already has a {hook}; {remedy}")


@contextlib.contextmanager
def _empty_context() -> Iterator[dict[str, Any]]:
    yield {}


class AwaitedContext(AbstractContextManager[Any]):
    """An async context manager that the worker enters and leaves on the loop of async jobs."""

    def __init__(self, manager: AbstractAsyncContextManager[Any], wait: Wait) -> None:
        self._manager = manager
        self._wait = wait

    def __enter__(self) -> Any:
        return self._wait(self._manager.__aenter__())

    def __exit__(self, *error: Any) -> bool | None:
        left: bool | None = self._wait(self._manager.__aexit__(*error))
        return left


def _refuse(coroutine: Awaitable[Any]) -> Any:
    if inspect.iscoroutine(coroutine):
        coroutine.close()
    raise UsageError(
        reason="an async job_context must be used by jobs of the worker process, but a job with "
        "executor 'process' has no asyncio loop; write the context with 'def'"
    )


def _ignore_failure(message: Message, context: Any, error: BaseException) -> None:
    """Do nothing, because the worker itself logs every failed attempt."""
