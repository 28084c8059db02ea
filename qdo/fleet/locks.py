"""Locks that all processes of an app share. A lock has one exclusive or many shared holders."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from qdo.coordination.side import LeasedConnection
from qdo.coordination.transactions import make_folder
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode, load
from qdo.errors import (
    LockLostError,
    LockTimeoutError,
    NodeRefusedError,
    QdoError,
    SectionLostError,
    UnreachableError,
    UsageError,
)
from qdo.fleet.limit_node import DeclaredLimit
from qdo.fleet.lock_contender import LockContender
from qdo.fleet.names import checked_name
from qdo.fleet.pause_machine import SectionWatch
from qdo.fleet.pauses import Record, add_pause, end_pauses, new_pause, wait_in_force
from qdo.fleet.permits import TRY_SECONDS, CoordinatorPermits, PermitService
from qdo.system.clock import checked_timeout, clock
from qdo.system.home_loop import at_home

# Maximum time for which `release` waits for its answer. Afterwards the release continues in the
# background.
RELEASE_SECONDS = 5.0
MAX_REASON_CHARACTERS = 200


class HeldLock:
    """A lock that this process holds or has lost.

    :ivar fence: a number that grows with every holder of the lock. Pass the fence to systems that
        can compare fences.
    """

    def __init__(self, name: str, fence: int, is_valid: Callable[[], bool]) -> None:
        self.name = name
        self.fence = fence
        self._is_valid = is_valid

    @property
    def valid(self) -> bool:
        """Whether certainly no other process holds the lock."""
        return self._is_valid()

    def check(self) -> None:
        """Raise LockLostError unless this process certainly holds the lock.

        Costs one reading of the clock.
        """
        if not self.valid:
            raise LockLostError(name=self.name)


class Section(HeldLock):
    """A pause of queues in the whole fleet that ends with this process.

    :ivar name: the globs of the queues.
    :param is_ended: a function that returns whether an operator has ended the section.
    """

    def __init__(
        self,
        name: str,
        fence: int,
        is_valid: Callable[[], bool],
        is_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name, fence, lambda: is_valid() and not is_ended())
        self._is_ended = is_ended

    def check(self) -> None:
        """Raise SectionLostError unless the queues are certainly paused.

        Costs one reading of the clock.
        """
        if not self.valid:
            reason = "the coordinator may have ended the session"
            if self._is_ended():
                reason = "an operator has ended it"
            raise SectionLostError(queues=self.name, reason=reason)


class LockService(Protocol):
    """The source of an app's locks and permits."""

    permits: PermitService

    def register(self, over: Any, timeout_seconds: float) -> None:
        """Wait until this process has a node. Set the event `over` when the session ends."""

    def pause(
        self, globs: tuple[str, ...], reason: str, timeout_seconds: float
    ) -> tuple[Section, Callable[[], None]]:
        """Wait until a section is in force; return the section and the function that ends it.

        :raises PauseNotObeyedError: the section was not in force before the timeout, so this call
            has ended the section.
        """

    def acquire(
        self, name: str, shared: bool, reason: str, timeout_seconds: float | None
    ) -> tuple[HeldLock, Callable[[], None]]:
        """Return a lock and the function that releases it, or raise LockTimeoutError."""


@contextmanager
def held_lock(
    service: Callable[[], LockService],
    name: str,
    shared: bool,
    reason: str,
    timeout_seconds: float | None,
) -> Iterator[HeldLock]:
    checked_name("lock", name)
    limit = None if timeout_seconds is None else checked_timeout(timeout_seconds)
    if len(reason) > MAX_REASON_CHARACTERS:
        most = MAX_REASON_CHARACTERS
        raise UsageError(
            reason=f"a reason must have at most {most} characters, got {len(reason)}; shorten it"
        )
    held, release = at_home(
        service().acquire, name, shared, reason, limit, undo=lambda taken: taken[1]()
    )
    try:
        yield held
    finally:
        at_home(release)


@contextmanager
def held_section(
    service: Callable[[], LockService], globs: tuple[str, ...], reason: str, timeout_seconds: float
) -> Iterator[Section]:
    limit = checked_timeout(timeout_seconds)
    section, end = at_home(service().pause, globs, reason, limit, undo=lambda begun: begun[1]())
    try:
        yield section
    finally:
        at_home(end)


class CoordinatorLocks:
    """Locks in the coordinator.

    Methods raise NodeRefusedError if the account may not acquire a lock or pause queues.

    :param writer: the name of this process in `qdo locks`.
    """

    # `qdo.operators.OperatorService` also uses this connection.
    operators = None

    def __init__(
        self,
        connection: LeasedConnection,
        layout: Layout,
        writer: str,
        limits: Mapping[str, DeclaredLimit],
    ) -> None:
        self._writer = writer
        self.connection = connection
        self.layout = layout
        self.permits: PermitService = CoordinatorPermits(connection, layout, limits)

    @property
    def over(self) -> bool:
        return self.connection.over

    def close(self) -> None:
        self.connection.close()

    def register(self, over: Any, timeout_seconds: float) -> None:
        self.connection.waiters.add(over)
        self.connection.wait_registered(timeout_seconds)

    def acquire(
        self, name: str, shared: bool, reason: str, timeout_seconds: float | None
    ) -> tuple[HeldLock, Callable[[], None]]:
        """Acquire a lock like `LockService.acquire`.

        Raise LockLostError if the session ends meanwhile.
        """
        folder = self.layout.fleet.lock(name)
        deadline = None if timeout_seconds is None else clock() + timeout_seconds
        while True:
            waiter = _Waiter(self.connection, folder, shared, self._about(reason))
            held = self._wait(waiter, name, timeout_seconds, deadline)
            if held is not None:
                return held, waiter.release
            # The app is new, so the contender could not create the folders above the lock.
            make_folder(self.connection.client, folder)

    def _wait(
        self, waiter: _Waiter, name: str, timeout_seconds: float | None, deadline: float | None
    ) -> HeldLock | None:
        contender = waiter.contender
        try:
            waiter.wait_held(deadline)
            if contender.homeless:
                waiter.release()
                return None
            if contender.refusal:
                account = self.connection.client.access.account_name()
                raise NodeRefusedError(path=self.layout.fleet.lock(name), account=account)
            if not contender.fence:
                if self.connection.over or contender.left:
                    raise LockLostError(name=name)
                holder = load(contender.ahead)[0].get("who")
                raise LockTimeoutError(
                    name=name,
                    seconds=timeout_seconds,
                    holder=f": it waits for {holder}" if isinstance(holder, str) else "",
                )
        except BaseException:
            waiter.release()
            raise
        connection = self.connection
        return HeldLock(name, contender.fence, lambda: connection.valid and not contender.left)

    def pause(
        self,
        globs: tuple[str, ...],
        reason: str,
        timeout_seconds: float,
        record: Record | None = None,
        on_wait: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> tuple[Section, Callable[[], None]]:
        """Pause queues like `LockService.pause`. See `wait_in_force` for `on_wait`."""
        connection = self.connection
        client = connection.client
        by = connection.wait_registered(timeout_seconds)
        pause = replace(new_pause(globs, reason), by=by, who=self._writer)
        watch = SectionWatch(self.layout.fleet.holds, pause.id)

        def end() -> None:
            connection.remove(watch)
            try:
                end_pauses(client, self.layout, [pause.id])
            except UnreachableError:
                connection.close()  # the section ends with the session of its process
            except QdoError:
                raise
            except BaseException:  # the worker is stopping the job
                connection.close()
                raise

        lifted = "it is lifted again"
        try:
            # The pause may exist even if this call fails, after a lost answer or a stopped job.
            zxid = add_pause(client, self.layout, pause, record=record)
            wait_in_force(client, self.layout, pause, zxid, timeout_seconds, on_wait, lifted)
        except BaseException:
            end()
            raise
        connection.add(watch)
        name = " ".join(pause.queues)
        return Section(name, zxid, lambda: connection.valid, lambda: watch.ended), end

    def _about(self, reason: str) -> dict[str, Any]:
        about = {"who": f"{self._writer} pid {os.getpid()}", "at": round(time.time(), 3)}
        return {**about, "why": reason} if reason else about


class _Waiter:
    """A contender, and the caller that waits for it."""

    def __init__(
        self, connection: LeasedConnection, folder: str, shared: bool, about: dict[str, Any]
    ) -> None:
        self._connection = connection
        self._changed: Any = connection.client.handler.event_object()
        self.contender = LockContender(
            folder,
            uuid.uuid4().hex[:8],
            encode(about),
            connection.session(connection.client),
            shared=shared,
            on_change=self._changed.set,
        )
        connection.waiters.add(self._changed)

    def wait_held(self, deadline: float | None) -> None:
        """Wait until the contender holds the lock, has left, or is late."""
        # Even with a timeout of 0, wait a moment to learn whether another contender is ahead.
        placed = None if deadline is None else max(deadline, clock() + TRY_SECONDS)
        self._connection.add(self.contender)
        while True:
            limit = deadline if self.contender.ahead else placed
            remaining = None if limit is None else limit - clock()
            if self._ended() or (remaining is not None and remaining <= 0):
                return
            self._changed.wait(remaining)
            self._changed.clear()

    def _ended(self) -> bool:
        contender = self.contender
        return bool(contender.fence or contender.refusal or contender.left or self._connection.over)

    def release(self) -> None:
        self._changed.clear()
        self._connection.call(self.contender.leave)
        deadline = clock() + RELEASE_SECONDS
        while not (self.contender.left or self.contender.refusal or self._connection.over):
            if clock() >= deadline:
                return  # the machine continues until the contender's node is gone
            self._changed.wait(deadline - clock())
            self._changed.clear()
        self._connection.remove(self.contender)
        self._connection.waiters.discard(self._changed)
