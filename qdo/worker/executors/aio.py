"""Runs ``async def`` jobs on one asyncio loop, many at once.

The loop has a native thread of its own, so it never holds up the worker's event loop. gevent's
patches would give it a selector and threads made of greenlets, which nobody runs there: it is
built on the originals.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gevent import monkey

from qdo.message import Message
from qdo.worker.executors.base import Executor, JobCall
from qdo.worker.executors.native import (
    Mailbox,
    Pending,
    allocate_lock,
    leave_gevent,
    start_thread,
)
from qdo.worker.executors.waiting import Wait

if TYPE_CHECKING:
    from qdo.app import Job

HELPERS = 32
"""Native threads for `asyncio.to_thread`, `run_in_executor` and name look-ups."""
LEAVE_SECONDS = 2.0
"""How long a loop that is blocked by a job is waited for at the end."""


class AsyncioExecutor(Executor):
    """An asyncio loop on a thread of its own, started with the first job."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._running = 0
        self._loop: JobLoop | None = None
        self._ended = allocate_lock()

    def bind(self, job: Job) -> JobCall:
        """Return a call that runs the coroutine on the loop and waits for its end."""

        def call(message: Message, context: Any) -> None:
            loop = self._started()
            if job.timeout_seconds is not None:
                message.limit(job.timeout_seconds)
            run = _Run(loop, Pending(self._mailbox))
            self._running += 1
            try:
                loop.call_soon_threadsafe(run.begin, job.function, message, context)
                Wait(job, message, run.pending, run.interrupt, asyncio.CancelledError).run()
            finally:
                self._running -= 1

        return call

    def under_way(self) -> int:
        """Return how many jobs run now."""
        return self._running

    def close(self) -> None:
        """End the loop, unless a job blocks it; then it goes with the process."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._ended.acquire(timeout=LEAVE_SECONDS)
            self._loop = None
        if not self._running:
            self._mailbox.close()

    def _started(self) -> JobLoop:
        if self._loop is None:
            self._loop = JobLoop()
            self._ended.acquire()
            start_thread(self._run, (self._loop,))
        return self._loop

    def _run(self, loop: JobLoop) -> None:
        """Run the loop: the body of its thread."""
        try:
            asyncio.set_event_loop(loop)
            loop.run_forever()
            loop.run_until_complete(_cancel_the_rest())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            leave_gevent()
            self._ended.release()


class _Run:
    """One run of a coroutine."""

    def __init__(self, loop: JobLoop, pending: Pending) -> None:
        self.pending = pending
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None

    def begin(self, function: Callable[..., Any], message: Message, context: Any) -> None:
        """Start it; on the loop's thread, like everything below but `interrupt`."""
        self._task = self._loop.create_task(self._whole(function, message, context))

    async def _whole(self, function: Callable[..., Any], message: Message, context: Any) -> None:
        error: BaseException | None = None
        try:
            await function(message, context)
        except BaseException as raised:  # noqa: BLE001 - the waiting greenlet raises it again
            error = raised
        self.pending.finish(error)
        error = None

    def interrupt(self) -> None:
        """Cancel the coroutine, at its next wait; from the worker's thread."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class JobLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose helpers are native threads."""

    def __init__(self) -> None:
        super().__init__(_selector())
        self._helpers = _Helpers()

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function in a native thread, or in an executor that was given."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        future: asyncio.Future[Any] = self.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            result, error = None, None
            try:
                result = func(*args)
            except BaseException as raised:  # noqa: BLE001 - it belongs to who awaits it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.call_soon_threadsafe(settle, result, error)

        self._helpers.submit(work)
        return future

    def close(self) -> None:
        """End the loop and its idle helpers."""
        self._helpers.end()
        super().close()


class _Helpers:
    """Up to `HELPERS` native threads, made when all others are busy."""

    def __init__(self) -> None:
        self._guard = allocate_lock()
        self._work: deque[Callable[[], None]] = deque()
        self._idle: list[Any] = []
        self._threads = 0
        self._ended = False

    def submit(self, work: Callable[[], None]) -> None:
        with self._guard:
            self._work.append(work)
            if self._idle:
                self._idle.pop().release()
            elif self._threads < HELPERS:
                self._threads += 1
                start_thread(self._run, ())

    def end(self) -> None:
        with self._guard:
            self._ended = True
            while self._idle:
                self._idle.pop().release()

    def _run(self) -> None:
        wake = allocate_lock()
        wake.acquire()
        while True:
            with self._guard:
                work = self._work.popleft() if self._work else None
                if work is None and self._ended:
                    break
                if work is None:
                    self._idle.append(wake)
            if work is not None:
                work()
            else:
                wake.acquire()
        leave_gevent()


async def _cancel_the_rest() -> None:
    """End the tasks that jobs have left behind."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _selector() -> Any:
    """Return a selector as Python made it, before gevent's patches."""
    kind = "EpollSelector" if sys.platform == "linux" else "DefaultSelector"
    return monkey.get_original("selectors", kind)()
