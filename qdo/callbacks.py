"""Whether functions can be called as qdo will call them, found out when they are registered."""

from __future__ import annotations

import inspect
from typing import Any

from qdo.errors import UsageError


def check_job(function: Any) -> None:
    """Raise UsageError unless `function` can be called as a job."""
    check_call(function, ("message", "context"), "job")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            reason=f"job {described(function)} is a generator and would never run: "
            "write it without 'yield'"
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
    """Return a function as MODULE:NAME, for messages and logs."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)
