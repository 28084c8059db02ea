"""The hooks of an app, which the engine and the testing kit call around its jobs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from qdo.errors import UsageError
from qdo.events import Event
from qdo.jobs.job import Job
from qdo.jobs.middleware import Middleware, compose
from qdo.jobs.signatures import check_call, check_hook, check_plain, describe_callable
from qdo.message import Message

ContextFactory = Callable[[], AbstractContextManager[Any]]
FailureHook = Callable[[Message, Any, BaseException], Any]
Observer = Callable[[Event], Any]


class Hooks:
    """The registered hooks of one app.

    :ivar job_context: makes the context manager of a worker; the default yields an empty dict.
    :ivar job_failure: called after a failed attempt; the default does nothing.
    :ivar observers: called with an event for each attempt, in the order of registration.
    :ivar middleware: functions that run around every job, the outermost first.
    :ivar own_middleware: qdo's own, around all others.
    """

    def __init__(self, app: str) -> None:
        self._app = app
        self.job_context: ContextFactory = _empty_context
        self.job_failure: FailureHook = _ignore_failure
        self.observers: list[Observer] = []
        self.middleware: list[Middleware] = []
        self.own_middleware: list[Middleware] = []

    def add_context(self, factory: Callable[[], Any]) -> None:
        """Register the app's `job_context`.

        :raises UsageError: the app already has one, or `factory` cannot be one.
        """
        if self.job_context is not _empty_context:
            raise self._already("job_context", "write one that yields the resources of both")
        self.replace_context(factory)

    def replace_context(self, factory: Callable[[], Any]) -> None:
        """Use a function as `job_context`, instead of the app's own if it has one."""
        check_call(factory, (), "job_context")
        check_plain(factory, "job_context")
        if inspect.isgeneratorfunction(factory):
            self.job_context = contextlib.contextmanager(factory)
        else:
            self.job_context = _checked(factory)

    def add_failure(self, hook: FailureHook) -> None:
        """Register the app's `job_failure`.

        :raises UsageError: the app already has one, or `hook` cannot be one.
        """
        if self.job_failure is not _ignore_failure:
            raise self._already("job_failure", "call one from the other")
        self.replace_failure(hook)

    def replace_failure(self, hook: FailureHook) -> None:
        """Use a function as `job_failure`, instead of the app's own if it has one."""
        check_hook(hook, ("message", "context", "error"), "job_failure")
        self.job_failure = hook

    def composed(self, job: Job) -> Job:
        """Return a job whose function includes the middleware; the job itself without any."""
        function = compose(job.function, [*self.own_middleware, *self.middleware])
        return job if function is job.function else replace(job, function=function)

    def _already(self, hook: str, remedy: str) -> UsageError:
        return UsageError(reason=f"app {self._app!r} already has a {hook}; {remedy}")


@contextlib.contextmanager
def _empty_context() -> Iterator[dict[str, Any]]:
    yield {}


def _checked(factory: Callable[..., Any]) -> ContextFactory:
    """Return a factory that checks that it made a context manager."""

    def make() -> AbstractContextManager[Any]:
        manager: AbstractContextManager[Any] = factory()
        if not hasattr(type(manager), "__enter__") or not hasattr(type(manager), "__exit__"):
            raise UsageError(
                reason=f"job_context {describe_callable(factory)} must return a context manager, "
                f"got an object of type {type(manager).__name__}; write 'yield' instead of "
                "'return', and the cleanup after it"
            )
        return manager

    return make


def _ignore_failure(message: Message, context: Any, error: BaseException) -> None:
    """Do nothing: the worker itself logs every failed attempt."""
