"""Run many ``async def`` jobs at once on one asyncio loop.

The loop runs in a separate native thread, so it never blocks the worker's event loop. The loop uses
Python's original selector and threads. gevent's versions need an event loop, which does not run in
this thread.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import sys
import traceback
from asyncio import unix_events
from collections import deque
from collections.abc import Awaitable, Callable
from threading import get_native_id
from typing import TYPE_CHECKING, Any, NamedTuple

import gevent
from gevent import monkey
from gevent._hub_local import get_hub_if_exists

from qdo.message import Message
from qdo.system.clock import clock
from qdo.system.home_loop import LoopMailbox, check_descriptors, stay_in_gevent
from qdo.system.native import native_lock, original, sleep, start_thread
from qdo.system.processes import waited_seconds
from qdo.text import describe_traceback
from qdo.worker.executors.base import Executor, JobCall, NotStarted, OnStart
from qdo.worker.executors.native_threads import native_threads
from qdo.worker.executors.wait import START_BACKOFF, Pending, TurnWait, started

if TYPE_CHECKING:
    from qdo.jobs.job import Job

_log = logging.getLogger(__name__)

# Seconds between two runs of gevent's event loop in the thread of a busy asyncio loop.
ATTEND_SECONDS = 0.005
# Maximum number of native threads for `asyncio.to_thread`, `run_in_executor` and name lookups.
HELPERS = 32
# Minimum run of the loop, in seconds, that resets the backoff of its restarts.
LASTING_SECONDS = 10.0
# Seconds within which the loop must respond while jobs run. The log names a job that blocks the
# loop.
BLOCKED_SECONDS = 1.0
# Seconds for which `close` waits for a loop that a job blocks.
LEAVE_SECONDS = 2.0


class AsyncioExecutor(Executor):
    """Runs coroutines on an asyncio loop, whose thread starts with the first job."""

    def __init__(self, may_start: Callable[[Message], bool]) -> None:
        self._may_start = may_start
        self._mailbox = LoopMailbox()
        self._running = 0
        self._loop: JobLoop | None = None
        self._watch = _BlockWatch(lambda: self._running > 0)
        self._stopping = False
        self._ended = native_lock()
        self._ended.acquire()

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return a call that runs the coroutine on the loop and waits for its end."""

        def call(message: Message, context: Any) -> None:
            loop = self._loop or started(
                self._loop_for_jobs,
                "the asyncio loop",
                job,
                message,
                self._may_start,
                OSError,
                RuntimeError,
            )
            if job.timeout_seconds is not None:
                message.limit(job.timeout_seconds)
            run = _Run(loop, Pending(self._mailbox), self._may_start, on_start)
            self._running += 1
            if not self._watch.active:
                self._watch.start(loop)
            try:
                loop.call_soon_threadsafe(run.begin, job, message, context)
                TurnWait(job, message, run.pending, run.interrupt, asyncio.CancelledError).run()
            finally:
                self._running -= 1

        return call

    def under_way(self) -> int:
        return self._running

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Await on the loop, and return the result. Blocks only the calling greenlet."""
        loop = self._loop_for_jobs()
        pending = Pending(self._mailbox)
        results: list[Any] = []
        tasks: list[asyncio.Task[None]] = []  # the loop itself has only weak references

        async def run() -> None:
            error: BaseException | None = None
            try:
                results.append(await awaitable)
            except BaseException as raised:  # noqa: BLE001 - the waiting greenlet raises it
                error = raised
            pending.finish(error)

        loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(run())))
        pending.ended.wait()
        if pending.error is not None:
            raise pending.error
        return results[0]

    def close(self) -> None:
        """Stop the loop. A loop that a job blocks ends with the process."""
        self._stopping = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._ended.acquire(timeout=LEAVE_SECONDS)
            self._loop = None
        if not self._running:
            self._mailbox.close()
            self._watch.close()

    def _loop_for_jobs(self) -> JobLoop:
        """Return the running loop; start one if needed, or raise OSError or RuntimeError."""
        if self._loop is None:
            check_descriptors()  # without descriptors, the destructor of a loop raises an error
            loop = JobLoop()
            try:
                start_thread(self._run, loop)
            except RuntimeError:
                loop.close()
                raise
            self._loop = loop
        return self._loop

    def _run(self, loop: JobLoop) -> None:
        try:
            asyncio.set_event_loop(loop)
            ident = original("_thread", "get_ident", _thread.get_ident)()
            loop.thread = _LoopThread(ident, get_native_id(), gevent.getcurrent())
            with native_threads():
                self._serve(loop)
        finally:
            loop.close()
            self._ended.release()
        stay_in_gevent()

    def _serve(self, loop: JobLoop) -> None:
        failures = 0
        while not self._stopping:
            began = clock()
            fault = _fault_of(loop.run_forever)
            failures = 1 if clock() - began > LASTING_SECONDS else failures + 1
            if not self._stopping:
                self._pause(fault, START_BACKOFF.delay(failures, 0.0))
        _fault_of(lambda: loop.run_until_complete(_cancel_remaining()))
        _fault_of(lambda: loop.run_until_complete(loop.shutdown_asyncgens()))

    def _pause(self, fault: str, seconds: float) -> None:
        """Wait before the loop runs again. The loop keeps its callbacks; no message has failed."""
        _log.error(
            "code of an async job ended the asyncio loop, which runs again in %.1f s; let no"
            " background task exit: %s",
            seconds,
            fault,
        )
        sleep(seconds)


def _fault_of(run: Callable[[], object]) -> str:
    """Run a loop until it ends; return the reason."""
    try:
        # A background task or a callback ends the loop by SystemExit or KeyboardInterrupt. Other
        # code ends the loop by `loop.stop`.
        run()
    except BaseException as error:  # noqa: BLE001 - the loop of all async jobs must live
        return describe_traceback(error)
    return "it was stopped"


class _Run:
    def __init__(
        self,
        loop: JobLoop,
        pending: Pending,
        may_start: Callable[[Message], bool],
        on_start: OnStart | None,
    ) -> None:
        self.pending = pending
        self._on_start = on_start
        self._may_start = may_start
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None

    def begin(self, job: Job, message: Message, context: Any) -> None:
        """Start the coroutine if the message may start. Call this on the loop's thread."""
        # The lease of the message may have ended while a job blocked this loop.
        if not self._may_start(message):
            self.pending.finish(NotStarted())
            return
        if self._on_start is not None:
            self._on_start(message)
        self._task = self._loop.create_task(self._call(job, message, context))
        self._task.add_done_callback(self._report_unbegun)

    def _report_unbegun(self, task: asyncio.Task[None]) -> None:
        """Report the end of a task if it was cancelled before `_call` began."""
        if task.cancelled():
            self.pending.finish(asyncio.CancelledError())

    async def _call(self, job: Job, message: Message, context: Any) -> None:
        error: BaseException | None = None
        try:
            await job.function(message, context)
        except BaseException as raised:  # noqa: BLE001 - the waiting greenlet raises it again
            error = raised
        self.pending.finish(error)
        error = None

    def interrupt(self) -> None:
        """Cancel the coroutine at its next wait. Call this on the worker's thread."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _LoopThread(NamedTuple):
    ident: int
    native: int
    greenlet: Any


class _BlockWatch:
    """Names the job that blocks the asyncio loop, on a timer of the worker's event loop.

    :ivar active: whether the timer is running. The timer runs while there are jobs.
    """

    # A coroutine that awaits while it holds a `threading.Lock` may block the loop forever. The next
    # coroutine waits for the lock on the thread that must release the lock.
    def __init__(self, has_jobs: Callable[[], bool]) -> None:
        self.active = False
        self._has_jobs = has_jobs
        self._timer = gevent.get_hub().loop.timer(BLOCKED_SECONDS, BLOCKED_SECONDS)
        self._asked_at = self._answered_at = self._waited = 0.0
        self._blocked_by = ""

    def start(self, loop: JobLoop) -> None:
        self.active = True
        self._timer.start(self._look, loop)

    def close(self) -> None:
        self._timer.stop()
        self._timer.close()

    def _look(self, loop: JobLoop) -> None:
        thread = loop.thread
        if thread is None:  # the thread has not begun to run
            return
        if self._answered_at < self._asked_at:
            self._report(thread)
            return
        if self._blocked_by:
            seconds = self._answered_at - self._asked_at
            _log.warning(
                "the asyncio loop runs again after %.1f s, blocked by %s", seconds, self._blocked_by
            )
            self._blocked_by = ""
        if self._has_jobs():
            self._asked_at = clock()
            self._waited = waited_seconds(thread.native)
            loop.call_soon_threadsafe(self._answer)
        else:
            self.active = False
            self._timer.stop()

    def _answer(self) -> None:
        self._answered_at = clock()

    def _report(self, thread: _LoopThread) -> None:
        # Subtract the time for which the thread waited for a processor.
        seconds = clock() - self._asked_at - (waited_seconds(thread.native) - self._waited)
        if self._blocked_by or seconds < 1.5 * BLOCKED_SECONDS:
            return
        self._blocked_by, stack = _blocking(thread)
        _log.warning(
            "the asyncio loop has been blocked for %.1f s by %s; all async jobs of this process"
            " are waiting. Await instead, as with asyncio.Lock, or call asyncio.to_thread."
            " Stack:\n%s",
            seconds,
            self._blocked_by,
            stack,
        )


def _blocking(thread: _LoopThread) -> tuple[str, str]:
    """Return the job on the stack of the loop's thread, and the stack."""
    # Code that waits through gevent is in a greenlet that does not run.
    frame = thread.greenlet.gr_frame or sys._current_frames().get(thread.ident)
    stack = "".join(traceback.format_stack(frame))
    while frame is not None:
        if frame.f_code is _Run._call.__code__:
            job = frame.f_locals["job"]
            message = frame.f_locals["message"]
            return f"queue {message.queue}, message {message.id}, job {job.name}", stack
        frame = frame.f_back
    return "code outside of jobs", stack


class JobLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose default executor uses native threads."""

    # gevent's `ThreadPoolExecutor` cannot replace `_Helpers`. asyncio accepts only futures of
    # `concurrent.futures`, and gevent's executor returns other futures (checked with gevent 26.9).
    def __init__(self) -> None:
        super().__init__(JobSelector())
        self._helpers = _Helpers()
        self.thread: _LoopThread | None = None

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function in a native thread, or in `executor` if it is not None."""
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
            result = None
            error = None
            try:
                result = func(*args)
            except BaseException as raised:  # noqa: BLE001 - the awaiting coroutine raises it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self.call_soon_threadsafe(settle, result, error)

        self._helpers.submit(work)
        return future

    async def _make_subprocess_transport(
        self, protocol: Any, args: Any, shell: bool, *pipes: Any, **options: Any
    ) -> Any:
        """Start a program for `asyncio.create_subprocess_exec`; return its connected transport."""
        if not monkey.is_module_patched("subprocess"):
            make: Any = super()._make_subprocess_transport  # type: ignore[misc]
            return await make(protocol, args, shell, *pipes, **options)
        # asyncio's watchers would wait for the program with `os.waitpid`, like gevent, and only one
        # of the two learns of its end.
        connected = self.create_future()
        transport = _UnixSubprocessTransport(
            self, protocol, args, shell, *pipes, waiter=connected, **options
        )

        def report(process: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self.call_soon_threadsafe(transport._process_exited, process.returncode)

        transport._proc.rawlink(report)
        try:
            await connected
        except BaseException:
            transport.close()
            raise
        return transport

    def close(self) -> None:
        self._helpers.end()
        super().close()


class _Helpers:
    """Up to `HELPERS` native threads. A new thread starts only when all others are busy."""

    def __init__(self) -> None:
        self._guard = native_lock()
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
                try:
                    start_thread(self._run)
                except RuntimeError:  # the system has no thread left
                    if not self._threads:
                        self._work.pop()
                        raise
                else:
                    self._threads += 1

    def end(self) -> None:
        with self._guard:
            self._ended = True
            while self._idle:
                self._idle.pop().release()

    def _run(self) -> None:
        with native_threads():
            self._serve()
        stay_in_gevent()

    def _serve(self) -> None:
        wake = native_lock()
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


async def _cancel_remaining() -> None:
    """Cancel the tasks that jobs left behind."""
    remaining = asyncio.all_tasks() - {asyncio.current_task()}
    for task in remaining:
        task.cancel()
    await asyncio.gather(*remaining, return_exceptions=True)


_UnixSubprocessTransport: Any = unix_events._UnixSubprocessTransport  # type: ignore[attr-defined]
_Selector: Any = monkey.get_original(
    "selectors", "EpollSelector" if sys.platform == "linux" else "DefaultSelector"
)


class JobSelector(_Selector):  # type: ignore[misc]
    """Python's selector, extended to run the thread's gevent event loop, if there is one."""

    # A greenlet that releases a lock for which this thread waits notifies it through gevent's loop.
    # Objects that jobs share, such as a pool, have such locks.

    _attended = 0.0
    _readable: Any = None

    def select(self, timeout: float | None = None) -> Any:
        hub = get_hub_if_exists()
        if hub is None:
            return super().select(timeout)
        if self._readable is None:
            self._readable = hub.loop.io(self.fileno(), 1)
        found = super().select(0)
        if not found and (timeout is None or timeout > 0):
            with gevent.Timeout(timeout, False):
                hub.wait(self._readable)
            found = super().select(0)
            self._attended = clock()
        elif clock() - self._attended >= ATTEND_SECONDS:
            gevent.sleep(0)
            self._attended = clock()
        return found
