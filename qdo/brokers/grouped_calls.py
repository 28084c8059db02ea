"""A native thread that handles calls of many threads, greenlets and coroutines in groups.

After each group, the thread handles all calls that have arrived meanwhile as the next group, in one
transaction or round trip. An idle thread handles a call immediately.
"""

from __future__ import annotations

import _thread
import abc
import os
import queue
import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from qdo.broker_errors import UnusableBrokerError
from qdo.brokers.base import Broker, Capabilities, Outgoing
from qdo.encoding import MAX_STORED_BODY_BYTES
from qdo.positions import message_id
from qdo.system.native import (
    LoopSignal,
    Settable,
    guarded,
    inbox,
    native_rlock,
    original,
    signal,
    start_thread,
)

W = TypeVar("W")

_get_ident: Any = original("_thread", "get_ident", _thread.get_ident)

# The size in bytes at which a group is complete.
GROUP_BYTES = 16 * 1024 * 1024


class GroupedCall(Generic[W]):
    __slots__ = ("_done", "_error", "_result", "size", "work")

    def __init__(self, work: W, size: int, done: Settable) -> None:
        self.work = work
        self.size = size
        self._done = done
        self._result: Any = None
        self._error: BaseException | None = None

    def finish(self, result: Any) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class GroupedCalls(abc.ABC, Generic[W]):
    """The calls of one process to a resource that one native thread uses.

    :ivar commits: the number of committed transactions, or groups of writes.
    :param name: the name of the thread in errors. The thread must live as long as its process.
    """

    def __init__(self, name: str) -> None:
        self.commits = 0
        self._name = name
        self._begun = 0  # the callers increase it
        self._ended_calls = 0  # the thread increases it
        self._pid = os.getpid()
        self._closed = False
        # This lock ensures that no call follows the close. The lock is reentrant, because a signal
        # handler or `__del__` may interrupt a call and make another call on the same thread.
        self._closing = native_rlock()
        self._ident = 0
        self._ended: Settable | None = None
        self._calls: queue.SimpleQueue[GroupedCall[W] | None] = inbox()

    def start(self) -> None:
        self._ident = start_thread(guarded(self._name, self._run))

    @property
    def waiting(self) -> int:
        return self._begun - self._ended_calls

    def call(self, work: W, size: int = 0) -> Any:
        """Let the thread do some work of about `size` bytes, and return the result."""
        done = signal()
        call = GroupedCall(work, size, done)
        self._put(call)
        done.wait()
        return call.outcome()

    async def acall(self, work: W, size: int = 0) -> Any:
        """Work like `call` for a coroutine, without blocking its event loop."""
        # If each call used a thread, the number of threads would limit the size of a group.
        done = LoopSignal()
        call = GroupedCall(work, size, done)
        self._put(call)
        await done.future
        return call.outcome()

    def _put(self, call: GroupedCall[W]) -> None:
        if self._pid != os.getpid():
            raise UnusableBrokerError(
                reason="this broker was opened before the process forked; open a broker in each"
                " process"
            )
        if self._ident == _get_ident():
            raise UnusableBrokerError(
                reason="cannot wait for the broker on its own thread: Python ran a `__del__` there;"
                " let it put the message into a queue.SimpleQueue, and send it from a thread of"
                " your own"
            )
        if sys.is_finalizing():
            raise UnusableBrokerError(
                reason="cannot use the broker while the interpreter exits: its threads have ended;"
                " send earlier, such as in a function of atexit"
            )
        with self._closing:
            if self._closed:
                raise UnusableBrokerError(reason="this broker is closed; open a new one to send")
            self._begun += 1
            self._calls.put(call)

    def close(self) -> None:
        """Finish the pending calls and release the resource. Idempotent."""
        with self._closing:
            own = self._pid == os.getpid() and self._ident != _get_ident()
            if self._closed or not own or sys.is_finalizing():
                return
            self._closed = True
            ended = self._ended = signal()
            self._calls.put(None)
        ended.wait()

    # --- on the thread ----------------------------------------------------------------

    @property
    def kept(self) -> int:
        """The number of calls that `handle` has kept; above 0, the thread calls `handle` again."""
        return 0

    @abc.abstractmethod
    def handle(self, calls: list[GroupedCall[W]]) -> None:
        """Finish, fail or keep each call; raise no error."""

    @abc.abstractmethod
    def release(self) -> None:
        """Release the resource, after the last call."""

    def _run(self) -> None:
        try:
            while self._step() or self.kept:
                pass
        finally:
            self.release()
            if self._ended is not None:
                self._ended.set()

    def _step(self) -> bool:
        """Handle the next group; return False if no further group follows."""
        kept = self.kept
        calls, closing = self._take(wait=not kept)
        if calls or kept:
            self.handle(calls)
            self._ended_calls += len(calls) + kept - self.kept
        return not closing

    def _take(self, *, wait: bool) -> tuple[list[GroupedCall[W]], bool]:
        """Return the queued calls, and whether to close; with `wait`, wait for the first call."""
        calls: list[GroupedCall[W]] = []
        size = 0
        closing = self._ended is not None  # read it first; later, no call can join the queue
        if not wait and self._calls.empty():
            return calls, closing
        call = self._calls.get()
        while call is not None:
            calls.append(call)
            size += call.size
            if size > GROUP_BYTES:
                return calls, False
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return calls, False
        return calls, True


class GroupCommitBroker(Broker):
    """A broker in a database. Its writer commits the messages of many calls together."""

    capabilities = Capabilities(
        ordered=True,
        seekable=True,
        countable=True,
        delay=True,
        peek=True,
        max_body_bytes=MAX_STORED_BODY_BYTES,
        dedup=True,
        requests=True,
        streams=True,
    )
    checked_size: Callable[[Outgoing], int]
    _writer: GroupedCalls[Any]

    @property
    def commits(self) -> int:
        return self._writer.commits

    @abc.abstractmethod
    def _append(self, messages: Sequence[Outgoing]) -> Any:
        """Return work that stores messages without options and returns their positions."""

    @abc.abstractmethod
    def _send(self, messages: Sequence[Outgoing]) -> Any:
        """Return work that stores messages with options and returns their ids."""

    def send_many(self, messages: Sequence[Outgoing]) -> list[str]:
        size = sum(map(self.checked_size, messages))
        if not messages:
            return []
        return self._ids(self._writer.call(self._work(messages), size))

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        size = sum(map(self.checked_size, messages))
        if not messages:
            return []
        return self._ids(await self._writer.acall(self._work(messages), size))

    def _work(self, messages: Sequence[Outgoing]) -> Any:
        for message in messages:  # a generator takes twice as long
            if message.terms is not None:
                return self._send(messages)
        return self._append(messages)

    def _ids(self, stored: range | list[str]) -> list[str]:
        if isinstance(stored, list):
            return stored
        return [message_id(position, self.id_node) for position in stored]
