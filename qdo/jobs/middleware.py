"""Code around the call of every job: checked when it is registered, composed once per job.

A middleware is a function ``(call_next, message, context)`` that runs the next middleware, or the
job, with ``call_next(message, context)``. ``def`` jobs need ``def`` middleware and ``async def``
jobs need ``async def`` middleware: one kind cannot wait for the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qdo.errors import UsageError
from qdo.jobs.options import is_async
from qdo.jobs.signatures import check_hook, describe_callable

Around = Literal["all", "sync", "async"]
"""The jobs of a middleware: all, only ``def`` jobs, or only ``async def`` jobs."""
MiddlewareFunction = Callable[[Callable[[Any, Any], Any], Any, Any], Any]
"""Called as ``function(call_next, message, context)``; its return value is ignored."""


@dataclass(frozen=True, slots=True)
class Middleware:
    """A registered middleware.

    :raises UsageError: it cannot be called as a middleware, or contradicts `jobs`.
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
        """Raise UsageError, with the remedy, if it cannot run around a job that it is for."""
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
        """Return whether it runs around a job."""
        return self.jobs == "all" or (self.jobs == "async") == is_async(function)


def compose(
    function: Callable[..., Any], registered: Sequence[Middleware]
) -> Callable[[Any, Any], Any]:
    """Return a job's function with its middleware around it, the first registered outermost.

    Without middleware for the job, return the function itself, at no cost per call.
    """
    around = [each.function for each in registered if each.is_for(function)]
    if not around:
        return function
    wrap = _wrap_async if is_async(function) else _wrap
    whole = function
    for middleware in reversed(around):
        whole = wrap(middleware, whole)
    # Errors and logs name the job, not its middleware.
    return functools.update_wrapper(whole, function)


def _wrap(middleware: MiddlewareFunction, inner: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def call(message: Any, context: Any) -> None:
        middleware(inner, message, context)

    return call


def _wrap_async(
    middleware: MiddlewareFunction, inner: Callable[..., Any]
) -> Callable[[Any, Any], Any]:
    name = describe_callable(middleware)

    async def call(message: Any, context: Any) -> None:
        made: list[Awaitable[Any]] = []

        def call_next(message: Any, context: Any) -> Awaitable[Any]:
            made.append(inner(message, context))
            return made[-1]

        await middleware(call_next, message, context)
        for each in made:
            # Otherwise the message would be done without its job.
            if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == "CORO_CREATED":
                each.close()
                raise UsageError(
                    reason=f"middleware {name} called call_next without waiting for it; write "
                    "await call_next(message, context)"
                )

    return call


def _keyword(asynchronous: bool) -> str:
    return "async def" if asynchronous else "def"
