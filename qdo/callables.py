"""Checks the functions of apps at their registration, and checks their results."""

from __future__ import annotations

import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from qdo.errors import UsageError

_LAZY = (CoroutineType, GeneratorType, AsyncGeneratorType)


def check_hook(
    function: Any, arguments: tuple[str, ...], role: str, *, may_be_async: bool = False
) -> None:
    """Raise UsageError unless `function` accepts a hook's arguments and runs synchronously."""
    check_call(function, arguments, role)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            reason=f"{role} {describe_callable(function)} is a generator and would never run; "
            "write it without 'yield'"
        )
    if not may_be_async:
        check_plain(function, role)


def check_plain(function: Any, role: str) -> None:
    """Raise UsageError if `function` returns a coroutine, which qdo would not await."""
    if is_async(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            reason=f"{role} {describe_callable(function)} is 'async def' and would never run; "
            "write it with 'def'"
        )


def is_async(function: Any) -> bool:
    """Return whether a call of a function or object returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - checks the kind of `__call__`
    )


def check_done(result: Any, function: Any, role: str) -> None:
    """Raise UsageError if a function has returned unfinished work, such as a coroutine."""
    # If a decorator, lambda or partial returns a coroutine or generator, `check_job` cannot detect
    # it. A message would then be done before any line of its job has run.
    if isinstance(result, _LAZY) or hasattr(type(result), "__await__"):
        if isinstance(result, (CoroutineType, GeneratorType)):
            result.close()  # otherwise Python warns about an unawaited coroutine
        raise UsageError(
            reason=f"{role} {describe_callable(function)} must return once its work is done, got "
            f"an unfinished {type(result).__name__}; write it, and its decorators, with "
            "'async def' and await the call, or with 'def' and without 'yield'"
        )


def check_call(function: Any, arguments: tuple[str, ...], role: str) -> None:
    """Raise UsageError unless `function` accepts the positional arguments for its role."""
    wanted = f"({', '.join(arguments)})"
    if not callable(function):
        raise UsageError(reason=f"{role} must be a function, got {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some callables written in C have no signature
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", "function")
        raise UsageError(
            reason=f"{role} {describe_callable(function)}{signature} cannot be called with {wanted}"
            f"; write def {name}{wanted}"
        ) from error


def describe_callable(function: Any) -> str:
    """Return a function as MODULE:NAME, for errors and logs."""
    function = getattr(function, "__wrapped__", function)  # the job inside composed middleware
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)
