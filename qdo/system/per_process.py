"""Objects that a forked child must not share with its parent, such as connections and sockets."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from qdo.errors import UsageError

_Held = TypeVar("_Held")
_Result = TypeVar("_Result")


def _call(function: Callable[[], _Result]) -> _Result:
    return function()


class PerProcess(Generic[_Held]):
    """An object that each process opens at the first use. Any thread may use the object.

    :param open: the function that opens the object. Two threads never call it at the same time.
    :param is_over: a function that returns whether the object is unusable and must be opened again.
    :param run: a function that calls `open`, such as `home_loop.at_home`.
    :param owner: the app that uses the object, for error messages.
    """

    def __init__(
        self,
        open: Callable[[], _Held],
        is_over: Callable[[_Held], bool] | None = None,
        run: Callable[[Callable[[], _Held]], _Held] = _call,
        owner: str = "",
    ) -> None:
        self._open = open
        self._is_over = is_over
        self._run = run
        self._owner = owner
        self._pid = 0
        self._held: Any = None
        self._inherited: list[_Held] = []
        self._stand_in: _Held | None = None
        self._lock = threading.RLock()
        self._busy = False
        _all.add(self)

    def get(self) -> _Held:
        if self._stand_in is not None:
            return self._stand_in
        held: _Held | None = self._held
        if held is None or self._pid != os.getpid() or self._over(held):
            return self._run(self._get)
        return held

    def is_open(self) -> bool:
        """Return whether `get` returns at once, without opening the object."""
        if self._stand_in is not None:
            return True
        held = self._held
        return held is not None and self._pid == os.getpid() and not self._over(held)

    def _get(self) -> _Held:
        with self.locked() as held:
            return held

    @contextlib.contextmanager
    def locked(self) -> Iterator[_Held]:
        """Yield the object while no other thread opens or closes it.

        :raises UsageError: the caller is a signal handler or `__del__` that interrupted the block
            in this thread.
        """
        with self._lock:
            if self._busy:
                raise UsageError(
                    reason="this thread is opening a connection, and a signal handler or `__del__`"
                    " cannot wait for that; let it put the message into a queue.SimpleQueue, and"
                    " send it from a thread of your own"
                )
            self._busy = True
            try:
                if self._held is not None and self._pid != os.getpid():
                    self._inherit()
                if self._held is None or self._over(self._held):
                    self._held = self._open()
                    self._pid = os.getpid()
                yield self._held
            finally:
                self._busy = False

    def _over(self, held: _Held) -> bool:
        return self._is_over is not None and self._is_over(held)

    def _inherit(self) -> None:
        # Keep a reference, because deleting the object would close the parent's files and
        # connections.
        self._inherited.append(self._held)
        self._held = None

    @contextlib.contextmanager
    def override(self, stand_in: _Held) -> Iterator[None]:
        """Use another object until the block ends; raise UsageError within such a block."""
        if self._stand_in is not None:
            raise UsageError(
                reason=f"app {self._owner!r} is being tested by another TestKit; close that first"
            )
        self._stand_in = stand_in
        try:
            yield
        finally:
            self._stand_in = None

    def close(self) -> None:
        """Close the object, unless a parent process opened it. The next use opens it again."""
        with self._lock:
            held = self._held
            own = self._pid == os.getpid()
            if held is not None and not own:
                self._inherit()
            self._held = None
        if held is not None and own:
            held.close()


_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replace the locks of the parent's other threads, which a forked child lacks."""
    for each in list(_all):
        each._lock = threading.RLock()
        each._busy = False


os.register_at_fork(after_in_child=_renew_locks)
