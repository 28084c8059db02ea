"""Code around the call of every job: checked when it is registered, composed once per job.

A middleware is a function ``(call_next, message, context)`` that runs what it is around with
``call_next(message, context)``. Jobs of ``def`` have middleware of ``def``, jobs of ``async
def`` have middleware of ``async def``: the one cannot wait for the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qdo.callbacks import check_hook, described
from qdo.errors import UsageError
from qdo.placement import is_async

Around = Literal["all", "sync", "async"]
"""Which jobs a middleware is for: every one, those of ``def``, those of ``async def``."""
MiddlewareFunction = Callable[[Callable[[Any, Any], Any], Any, Any], Any]
"""Called as ``function(call_next, message, context)``; what it returns is ignored."""


@dataclass(frozen=True, slots=True)
class Middleware:
    """A registered middleware.

    :raises UsageError: it cannot be called as one, or contradicts `jobs`.
    """

    function: MiddlewareFunction
    jobs: Around = "all"

    def __post_init__(self) -> None:
        if self.jobs not in get_args(Around):
            raise UsageError(
                reason=f"jobs={self.jobs!r} is none of {', '.join(get_args(Around))}: it says "
                "around which jobs a middleware runs"
            )
        check_hook(
            self.function, ("call_next", "message", "context"), "middleware", may_be_async=True
        )
        if self.jobs != "all" and (self.jobs == "async") != is_async(self.function):
            raise UsageError(
                reason=f"middleware {described(self.function)} with jobs={self.jobs!r} must be "
                f"written with '{_keyword(self.jobs == 'async')}'"
            )

    def check_job(self, function: Callable[..., Any]) -> None:
        """Raise UsageError, with the remedy, where it cannot run around a job it is for."""
        if self.jobs != "all" or is_async(function) == is_async(self.function):
            return
        own = is_async(self.function)
        only = "async" if own else "sync"
        raise UsageError(
            reason=f"middleware {described(self.function)} is '{_keyword(own)}' and cannot run "
            f"around job {described(function)}, which is '{_keyword(not own)}': write it with "
            f"'{_keyword(not own)}', or register it with @app.middleware(jobs={only!r}) and it "
            "passes over such jobs"
        )

    def is_for(self, function: Callable[..., Any]) -> bool:
        """Return whether it runs around a job."""
        return self.jobs == "all" or (self.jobs == "async") == is_async(function)


def compose(
    function: Callable[..., Any], registered: Sequence[Middleware]
) -> Callable[[Any, Any], Any]:
    """Return a job's function with the middleware around it, the first registered outermost.

    Without any that is for it the function itself, so that nobody pays for what is not there.
    """
    around = [each.function for each in registered if each.is_for(function)]
    if not around:
        return function
    wrap = _wrap_async if is_async(function) else _wrap
    whole = function
    for middleware in reversed(around):
        whole = wrap(middleware, whole)
    # Errors and logs name the job, not what is around it.
    return functools.update_wrapper(whole, function)


def _wrap(middleware: MiddlewareFunction, inner: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def call(message: Any, context: Any) -> None:
        middleware(inner, message, context)

    return call


def _wrap_async(
    middleware: MiddlewareFunction, inner: Callable[..., Any]
) -> Callable[[Any, Any], Any]:
    name = described(middleware)

    async def call(message: Any, context: Any) -> None:
        made: list[Awaitable[Any]] = []

        def call_next(message: Any, context: Any) -> Awaitable[Any]:
            made.append(inner(message, context))
            return made[-1]

        await middleware(call_next, message, context)
        for each in made:
            # Else the message would be done and its job never run.
            if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == "CORO_CREATED":
                each.close()
                raise UsageError(
                    reason=f"middleware {name} called call_next and did not wait for it: write "
                    "await call_next(message, context)"
                )

    return call


def _keyword(asynchronous: bool) -> str:
    return "async def" if asynchronous else "def"
