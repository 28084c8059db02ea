"""Whether functions can be called as qdo will call them, found out when they are registered."""

from __future__ import annotations

import inspect
from typing import Any

from qdo.errors import UsageError


def check_job(function: Any, first: str = "message") -> None:
    """Raise UsageError unless `function` can be called as a job.

    :param first: what its first argument is called in the error, "message" or "batch".
    """
    check_call(function, (first, "context"), "job")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            reason=f"job {described(function)} is a generator and would never run: "
            "write it without 'yield'"
        )


def check_hook(
    function: Any, arguments: tuple[str, ...], role: str, *, may_be_async: bool = False
) -> None:
    """Raise UsageError unless `function` can be called as a hook and then does its work."""
    check_call(function, arguments, role)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            reason=f"{role} {described(function)} is a generator and would never run: "
            "write it without 'yield'"
        )
    if not may_be_async:
        check_plain(function, role)


def check_plain(function: Any, role: str) -> None:
    """Raise UsageError if calling `function` makes a coroutine, which nobody would wait for."""
    if is_async(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            reason=f"{role} {described(function)} is 'async def' and would never run: "
            "write it with 'def'"
        )


def is_async(function: Any) -> bool:
    """Return whether calling a function, or an object, makes a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - its kind is asked, not whether it is
    )


def check_call(function: Any, arguments: tuple[str, ...], role: str) -> None:
    """Raise UsageError unless `function` can be called with these positional arguments.

    :param role: what it is to be, such as "job", for the message.
    """
    wanted = f"({', '.join(arguments)})"
    if not callable(function):
        raise UsageError(reason=f"{role} {function!r} is no function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some callables written in C tell nothing about themselves
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", "function")
        raise UsageError(
            reason=f"{role} {described(function)}{signature} cannot be called with {wanted}: "
            f"write def {name}{wanted}"
        ) from error


def described(function: Any) -> str:
    """Return a function as MODULE:NAME, for messages and logs.

    What wraps one, such as middleware, goes by the name of what it wraps.
    """
    function = getattr(function, "__wrapped__", function)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)
