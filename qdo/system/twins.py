"""Calls for coroutines: the `a...` twin of each call that waits, and `async with`.

A call that waits begins with `warn_if_blocking`, and its class names its twin::

    def cancel(self, queue: str) -> bool:
        warn_if_blocking()
        ...

    acancel = twin(cancel)

A twin has the parameters, result and errors of its call, and runs it in a native thread. With a
`connection`, the method `_within` of its class runs the call.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import warnings
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from qdo.errors import BlockedLoopWarning
from qdo.system.native import LoopSignal, native_lock, start_thread

_Self = TypeVar("_Self")
_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")

_imported = sys.modules.get


def _no_loop() -> object:
    """Look for the loop, and replace this function once asyncio is imported."""
    # Without asyncio, no loop runs. Its import takes 20 ms, and most senders do not need it.
    global _running_loop
    module: Any = _imported("_asyncio")
    if module is None:
        return None
    _running_loop = module._get_running_loop
    return _running_loop()


_running_loop: Callable[[], object] = _no_loop


def warn_if_blocking(within: object = None, block: str = "") -> None:
    """Warn if the calling function would block a running event loop; takes 50 ns.

    :param within: the connection of a transaction that the call joins, as in the function of
        `AsyncSession.run_sync`. Its statement does not block.
    :param block: name of a method whose ``with`` block waits, instead of the calling function.
    """
    if _running_loop() is not None and within is None:
        _warn(block)


def _warn(block: str) -> None:
    frame = sys._getframe(2)
    name = frame.f_code.co_name
    call = f"with {block}(...)" if block else f"{name}(...)"
    remedy = f"async {call}" if block else f"await a{call}"
    level = 3
    # The warning must name the line of the app, because Python shows a warning once for each line.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("qdo."):
        frame = frame.f_back
        level += 1
    warnings.warn(
        f"`{call}` blocks the event loop of this thread, and with it all other coroutines; write "
        f"`{remedy}`",
        BlockedLoopWarning,
        stacklevel=level,
    )


def twin(
    method: Callable[Concatenate[_Self, _P], _Result], *, alone: bool = False
) -> Callable[Concatenate[_Self, _P], Coroutine[Any, Any, _Result]]:
    """Return the method for coroutines that calls `method` in a native thread.

    :param alone: use a new thread, for a call that may wait for other coroutines. In the threads of
        the loop, such calls would wait for each other.
    """
    name = method.__name__
    run_in = in_own_thread if alone else in_thread

    @functools.wraps(method)
    async def call(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        # Get the method by name, because a class may override it.
        bound: Callable[..., _Result] = getattr(self, name)
        connection = kwargs.get("connection")
        if connection is not None:
            within: Any = getattr(self, "_within")  # noqa: B009 - only some classes have it
            options = {**kwargs}
            del options["connection"]
            result: _Result = await within(
                connection, lambda plain: bound(*args, connection=plain, **options)
            )
            return result
        return await run_in(functools.partial(bound, *args, **kwargs))

    call.__name__ = f"a{name}"
    call.__qualname__ = f"{method.__qualname__.removesuffix(name)}a{name}"
    call.__doc__ = f"Call `{name}` from a coroutine, without blocking its loop."
    return call


async def in_thread(function: Callable[[], _Result]) -> _Result:
    """Call a function in a thread of the running loop's executor."""
    import asyncio

    return await asyncio.to_thread(function)


async def in_own_thread(
    function: Callable[[], _Result], undo: Callable[[_Result], object] | None = None
) -> _Result:
    """Call a function in a new thread.

    :param undo: a function to call with the result if the coroutine is cancelled and does not get
        the result.
    """
    signal = LoopSignal()
    done = native_lock()
    done.acquire()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - the coroutine raises it
            errors.append(error)
        done.release()
        signal.set()

    def give_up() -> None:
        done.acquire()
        if results and undo is not None:
            undo(results[0])

    start_thread(contextvars.copy_context().run, run)
    try:
        await signal.future
    except BaseException:
        start_thread(give_up)  # the function continues, and may still acquire a lock
        raise
    if errors:
        raise errors[0]
    return results[0]


class AsyncEntry(Generic[_Value]):
    """Adds ``async with`` to a context manager whose entry or exit waits."""

    def __enter__(self) -> _Value:
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> _Value:
        return await in_own_thread(self.__enter__, lambda value: self.__exit__(None, None, None))

    async def __aexit__(self, *error: object) -> None:
        # The thread ends the block even if this coroutine is cancelled.
        await in_own_thread(functools.partial(self.__exit__, *error))


class AsyncBlock(AsyncEntry[_Value]):
    """A block for ``with`` and ``async with`` that waits when it begins and ends."""

    def __init__(self, name: str, manager: AbstractContextManager[_Value]) -> None:
        self._name = name
        self._manager = manager

    def __enter__(self) -> _Value:
        warn_if_blocking(block=self._name)
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)
