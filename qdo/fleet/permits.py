"""Permits of limits for scripts, web servers, and code within a job.

A process with permits has a share of each limit that it uses, by the same rules as a worker (see
`shares`). The process has a node below ``components`` instead of a worker node.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Protocol

from qdo.coordination.side import LeasedConnection
from qdo.coordination.znodes.layout import Layout
from qdo.errors import (
    CoordinatorUnreachableError,
    LimitNotFoundError,
    LimitTimeoutError,
    PermitLostError,
    RejectedError,
    UsageError,
)
from qdo.fleet.limit_node import MISSING, DeclaredLimit
from qdo.fleet.names import checked_name
from qdo.fleet.shares import LimitShare
from qdo.system.clock import checked_timeout, clock
from qdo.system.home_loop import at_home
from qdo.system.twins import AsyncEntry, twin, warn_if_blocking

# Maximum time for which `try_acquire` waits for a share after the coordinator knows the demand.
# Until then it waits up to `REGISTER_SECONDS`, because a slow answer is not a refusal.
TRY_SECONDS = 0.5
# Maximum time for the registration of this process.
REGISTER_SECONDS = 15.0


class HeldPermit(AsyncEntry["HeldPermit"]):
    """Permits of one or more limits, held until `release` or the end of a ``with`` block."""

    def __init__(self, names: Sequence[str], is_valid: Callable[[], bool], held: ExitStack) -> None:
        self.names = tuple(names)
        self._is_valid = is_valid
        self._held = held
        self._is_released = False

    @property
    def valid(self) -> bool:
        """Whether certainly no other process has the permits."""
        return not self._is_released and self._is_valid()

    def check(self) -> None:
        """Raise PermitLostError unless this process certainly holds the permits.

        Costs one reading of the clock.
        """
        if not self.valid:
            raise PermitLostError(name=", ".join(self.names))

    def release(self) -> None:
        """Return the permits. Further calls do nothing."""
        warn_if_blocking()
        self._is_released = True
        self._held.close()

    arelease = twin(release)

    def __enter__(self) -> HeldPermit:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class PermitService(Protocol):
    """The source of an app's permits."""

    @property
    def valid(self) -> bool: ...

    def take(self, name: str, timeout_seconds: float | None) -> Callable[[], None] | None:
        """Take a permit, and return the function that returns the permit.

        Return None after the timeout.

        :raises LimitNotFoundError: the limit does not exist.
        """


class PermitAsk(AsyncEntry[HeldPermit]):
    """The result of `App.limit`: acquires permits for a ``with`` block, or tries once."""

    def __init__(
        self,
        service: Callable[[], PermitService],
        names: Sequence[str],
        timeout_seconds: float | None,
    ) -> None:
        if not names:
            raise UsageError(reason="app.limit needs the name of a limit")
        # All callers use this order, so two callers never wait for each other.
        self._names = sorted({checked_name("limit", name) for name in names})
        self._service = service
        self._timeout = None if timeout_seconds is None else checked_timeout(timeout_seconds)
        self._entered: list[HeldPermit] = []

    def try_acquire(self) -> HeldPermit | None:
        """Return permits, or None if a limit has no free permit now.

        :raises LimitNotFoundError: the limit does not exist.
        """
        warn_if_blocking()
        held = self._acquire(TRY_SECONDS)
        return held if isinstance(held, HeldPermit) else None

    atry_acquire = twin(try_acquire)

    def _acquire(self, timeout_seconds: float | None) -> HeldPermit | str:
        """Return permits, or the name of a limit that had no permit before the timeout."""
        deadline = None if timeout_seconds is None else clock() + timeout_seconds
        while True:
            # A waiting caller loses nothing when the session ends, and waits in the next session.
            with suppress(PermitLostError):
                return self._take(deadline)

    def _take(self, deadline: float | None) -> HeldPermit | str:
        service = self._service()
        with ExitStack() as stack:
            for name in self._names:
                seconds = None if deadline is None else max(0.0, deadline - clock())
                give_back = at_home(service.take, name, seconds, undo=_undo_take)
                if give_back is None:
                    return name
                stack.callback(at_home, give_back)
            return HeldPermit(self._names, lambda: service.valid, stack.pop_all())

    def __enter__(self) -> HeldPermit:
        warn_if_blocking(block="app.limit")
        # A timeout of 0 requests only free permits, but the answer takes a moment.
        held = self._acquire(None if self._timeout is None else max(self._timeout, TRY_SECONDS))
        if not isinstance(held, HeldPermit):
            raise LimitTimeoutError(name=held, seconds=self._timeout or 0.0)
        self._entered.append(held)
        return held

    def __exit__(self, *error: object) -> None:
        self._entered.pop().release()


def _undo_take(give_back: Callable[[], None] | None) -> None:
    if give_back is not None:
        give_back()


class _Waiter:
    """A caller that waits for a permit. Only the connection's loop changes this object."""

    # The loop sets the event for a permit, for a fault, and when the coordinator knows the demand.
    def __init__(self, event: Any) -> None:
        self.event = event
        self.granted = self.asked = False
        self.fault: str | None = None

    @property
    def ended(self) -> bool:
        return self.granted or self.fault is not None


class _Line:
    """The callers of one limit in this process, in the order of their calls."""

    def __init__(self, path: str, share: Callable[[Callable[[], None]], LimitShare]) -> None:
        self.waiting: deque[_Waiter] = deque()
        self.share = share(self.serve)
        self._path = path

    def enter(self, waiter: _Waiter) -> None:
        if self.share.known_fault is not None:
            self.share.changed(self._path)  # read again; an operator may have repaired it
        self.waiting.append(waiter)
        self.serve()

    def leave(self, waiter: _Waiter) -> None:
        """Remove a caller, and return its permit if the caller already has a permit."""
        if waiter.granted:
            self.give_back()
        elif waiter in self.waiting:
            self.waiting.remove(waiter)
            self.share.wait(len(self.waiting))

    def give_back(self) -> None:
        self.share.give_back()
        self.serve()

    def serve(self) -> None:
        while self.waiting and self.share.has_free():
            self.share.take()
            waiter = self.waiting.popleft()
            waiter.granted = True
            waiter.event.set()
        fault = self.share.known_fault
        while self.waiting and fault is not None:
            waiter = self.waiting.popleft()
            waiter.fault = fault
            waiter.event.set()
        if self.share.has_asked:  # the callers' time to wait for a share begins now
            for waiter in self.waiting:
                if not waiter.asked:
                    waiter.asked = True
                    waiter.event.set()
        self.share.wait(len(self.waiting))


class CoordinatorPermits:
    """Permits of the limits in the coordinator, for one process."""

    def __init__(
        self, connection: LeasedConnection, layout: Layout, declared: Mapping[str, DeclaredLimit]
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._declared = declared
        self._lines: dict[str, _Line] = {}

    @property
    def valid(self) -> bool:
        return self._connection.valid

    def take(self, name: str, timeout_seconds: float | None) -> Callable[[], None] | None:
        """Take a permit like `PermitService.take`.

        Also raise RejectedError if this process cannot read or write the limit, PermitLostError if
        the session ends meanwhile, and CoordinatorUnreachableError if the registration fails.
        """
        connection = self._connection
        try:
            path = connection.wait_registered(REGISTER_SECONDS)
        except CoordinatorUnreachableError:
            if connection.over:
                raise PermitLostError(name=name) from None
            raise
        waiter = _Waiter(connection.client.handler.event_object())
        connection.waiters.add(waiter.event)  # the end of the session wakes the caller
        kept = False
        try:
            connection.call(partial(self._enter, name, path, waiter))
            self._wait(waiter, timeout_seconds)
            kept = waiter.granted and not connection.over
        finally:  # the worker may stop the job here, for example at its deadline
            connection.waiters.discard(waiter.event)
            if not kept:
                connection.call(partial(self._leave, name, waiter))
        if kept:
            return partial(connection.call, self._lines[name].give_back)
        if waiter.fault == MISSING:
            raise LimitNotFoundError(name=name, hint="")
        if waiter.fault is not None:
            raise RejectedError(
                reason=f"limit {name!r} cannot be used: {waiter.fault}; see `qdo limits list`",
                name=name,
            )
        if connection.over:
            raise PermitLostError(name=name)
        return None

    def _wait(self, waiter: _Waiter, timeout_seconds: float | None) -> None:
        began = clock()
        is_try = timeout_seconds is not None and timeout_seconds <= TRY_SECONDS
        waiter.event.wait(REGISTER_SECONDS if is_try else timeout_seconds)
        waiter.event.clear()
        if not waiter.asked or waiter.ended or self._connection.over:
            return
        if timeout_seconds is None or is_try:
            waiter.event.wait(timeout_seconds)
        else:
            waiter.event.wait(max(0.0, timeout_seconds - (clock() - began)))

    # --- on the loop ----------------------------------------------------------------------

    def _enter(self, name: str, path: str, waiter: _Waiter) -> None:
        line = self._lines.get(name)
        if line is None:
            share = partial(self._share, name, path)
            line = self._lines[name] = _Line(self._layout.fleet.limit(name), share)
            self._connection.add(line.share)
        line.enter(waiter)

    def _share(self, name: str, path: str, on_change: Callable[[], None]) -> LimitShare:
        return LimitShare(
            self._layout,
            name,
            path.removeprefix(f"{self._layout.components}/"),
            self._connection.lease,
            clock=clock,
            on_change=on_change,
            chance=random.random,
            declared=self._declared.get(name),
        )

    def _leave(self, name: str, waiter: _Waiter) -> None:
        if name in self._lines:
            self._lines[name].leave(waiter)
