"""Run jobs in native threads, for libraries that block and code that computes.

Each running job has a thread. The executor starts threads on demand and reuses them. At most
`concurrency` jobs, and so at most as many threads, run at once.

To interrupt a job, the interpreter raises an exception in its thread at the next Python
instruction. The exception must never reach the thread after the end of the job, see
`_JobThread._seal`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import gevent
from gevent import monkey
from gevent.event import Event

from qdo.message import Message
from qdo.system.clock import clock
from qdo.system.home_loop import LoopMailbox, leave_gevent, own_hub
from qdo.system.native import cancel_raise, native_lock, raise_in_thread, sleep, start_thread
from qdo.worker.executors.base import Executor, JobCall, JobInterrupt, NotStarted, OnStart
from qdo.worker.executors.wait import Pending, TurnWait, started

if TYPE_CHECKING:
    from qdo.jobs.job import Job, JobFunction

# Seconds within which the event loop of a job's thread should interrupt a waiting job.
ROUSE_SECONDS = 0.02
# Seconds for which idle threads wait natively before their event loops run. The next message of a
# busy queue arrives sooner, and would cost 30 us more through the event loop. A timer of the
# worker's event loop measures this time, because a timeout of each native wait would cost 4 us per
# message.
BRIEF_SECONDS = 0.001
# Seconds between two runs of the event loop of a busy thread.
ATTEND_SECONDS = 0.005


class ThreadExecutor(Executor):
    """Runs each job in its own native thread; starts threads on demand and reuses them."""

    def __init__(self, may_start: Callable[[Message], bool]) -> None:
        self._may_start = may_start
        self._mailbox = LoopMailbox()
        self._running = 0
        self._idle: list[_JobThread] = []
        self._rests = gevent.get_hub().loop.timer(BRIEF_SECONDS)
        self._rests_due = False

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return a call that passes a message to a thread and waits for the end of the job."""

        def call(message: Message, context: Any) -> None:
            if self._idle:
                thread = self._idle.pop()
            else:
                thread = started(
                    self._take, "a thread", job, message, self._may_start, OSError, RuntimeError
                )
            if job.timeout_seconds is not None:
                message.limit(job.timeout_seconds)
            self._running += 1
            try:
                pending = thread.begin(job.function, message, context, on_start)
                TurnWait(job, message, pending, thread.interrupt, JobInterrupt).run()
            finally:
                self._running -= 1
                if thread.interrupted:
                    thread.end()
                else:
                    self._idle.append(thread)
                    if not self._rests_due:
                        self._rests_due = True
                        self._rests.start(self._let_rest)

        return call

    def _let_rest(self) -> None:
        self._rests_due = False
        for thread in self._idle:
            thread.rest()

    def _take(self) -> _JobThread:
        if self._idle:  # a thread became idle after a failed start
            return self._idle.pop()
        thread = _JobThread(self._mailbox, self._may_start)
        try:
            thread.ready.ended.wait()
        except BaseException:  # the worker aborted the turn
            thread.end()
            raise
        if thread.ready.error is not None:
            raise thread.ready.error
        return thread

    def under_way(self) -> int:
        return self._running

    def close(self) -> None:
        """End the idle threads. A thread whose job never ends lasts until the process exits."""
        # A thread with an event loop also lasts until the process exits, see `stay_in_gevent`.
        for thread in self._idle:
            if thread.has_loop:
                thread.rest()
            else:
                thread.end()
        self._idle.clear()
        if not self._running:
            self._mailbox.close()
            self._rests.stop()
            self._rests.close()


class _Work(NamedTuple):
    function: JobFunction
    message: Message
    context: Any
    on_start: OnStart | None
    pending: Pending


class _JobThread:
    """A native thread that runs one job after the other until an interruption.

    :cvar all: all threads that have not ended.
    :ivar ready: ends when the thread can run jobs, or with the error that prevents it.
    """

    all: ClassVar[set[_JobThread]] = set()

    def __init__(self, mailbox: LoopMailbox, may_start: Callable[[Message], bool]) -> None:
        self._mailbox = mailbox
        self._may_start = may_start
        self._work: _Work | None = None
        self._due: Any = None
        self._resting = self._ending = False
        self._attended = 0.0
        self._inbox: LoopMailbox | None = None
        self._wake = native_lock()
        self._wake.acquire()
        self._sealed = True
        self._wanted = False
        self._delivered = False
        self._interrupting = False
        self._serial = 0
        self._hub: Any = None
        self.greenlet: Any = None
        self.ready = Pending(mailbox)
        self.ident: int = start_thread(self._run)

    # --- on the event loop's thread ---

    @property
    def interrupted(self) -> bool:
        """Whether the executor interrupted the last job; if so, it does not reuse the thread."""
        return self._wanted

    @property
    def has_loop(self) -> bool:
        """Whether gevent's event loop runs in the thread while it is idle."""
        return self._inbox is not None

    def begin(
        self, function: JobFunction, message: Message, context: Any, on_start: OnStart | None
    ) -> Pending:
        pending = Pending(self._mailbox)
        self._work = _Work(function, message, context, on_start, pending)
        self._serial += 1
        self._wanted = self._delivered = False
        self._ring()
        return pending

    def interrupt(self) -> None:
        """Raise JobInterrupt in the job, unless it has ended."""
        # Code that waits through gevent waits in its thread's event loop, and that loop raises the
        # exception. If the loop does not run, the job is busy, and the interpreter raises the
        # exception.
        self._wanted = True
        self._delivered = False
        if self._hub is None:
            self._strike(self._serial)
        else:
            self._hub.loop.run_callback_threadsafe(self._rouse, self._serial)
            gevent.spawn_later(ROUSE_SECONDS, self._strike, self._serial)

    def _strike(self, serial: int) -> None:
        """Raise JobInterrupt at the job's next Python instruction."""
        self._interrupting = True
        if not self._sealed and not self._delivered and serial == self._serial:
            self._delivered = True
            raise_in_thread(self.ident, JobInterrupt)
        self._interrupting = False

    def end(self) -> None:
        """End this thread, which must be idle."""
        self._ending = True
        self._ring()

    def rest(self) -> None:
        """Let this idle thread run its event loop until it gets work."""
        # Greenlets that jobs left behind live in this loop, and a lock that another thread releases
        # may notify its next owner through this loop.
        if not self._resting and self._inbox is not None:
            self._resting = True
            self._wake.release()

    def _ring(self) -> None:
        if self._resting and self._inbox is not None:
            self._resting = False
            self._inbox.post(self._due.set)
        else:
            self._wake.release()

    # --- on its own thread ---

    def _run(self) -> None:
        try:
            if monkey.is_module_patched("socket"):
                hub = own_hub()
                hub.handle_error = self._on_loop_error
                self.greenlet = gevent.getcurrent()
                self._hub = hub
                self._due = Event()
                self._inbox = LoopMailbox()
        except Exception as error:  # noqa: BLE001 - raised where a message waits for this thread
            self.ready.finish(error)
            return
        self.all.add(self)
        self.ready.finish(None)
        try:
            while True:
                work = self._next()
                if work is None:
                    return
                self._attempt(work)
                del work
        finally:
            self.all.discard(self)
            leave_gevent()

    def _next(self) -> _Work | None:
        """Wait for work; return None if the thread must end."""
        if self._inbox is not None and clock() - self._attended >= ATTEND_SECONDS:
            gevent.sleep(0)
            self._attended = clock()
        self._wake.acquire()
        while self._work is None and not self._ending:  # see `rest`
            self._due.wait()
            self._due.clear()
        work = self._work
        self._work = None
        return work

    def _attempt(self, work: _Work) -> None:
        error: BaseException | None = None
        try:
            try:
                self._unseal()
                # The lease may have ended before this thread ran on a busy machine.
                if not self._may_start(work.message):
                    raise NotStarted
                if work.on_start is not None:
                    work.on_start(work.message)
                work.function(work.message, work.context)
            except BaseException as raised:  # noqa: BLE001 - the waiting greenlet raises it
                error = raised
            self._seal()
        except JobInterrupt as late:
            # The interruption came between the job's end and the seal. The job may have returned.
            self._seal()
            error = late if error is None else error
        work.pending.finish(error)
        error = None

    def _rouse(self, serial: int) -> None:
        """Raise JobInterrupt in the waiting job; called by this thread's event loop."""
        if not self._sealed and not self._delivered and serial == self._serial:
            self._delivered = True
            self.greenlet.throw(JobInterrupt)

    def _on_loop_error(self, context: Any, kind: Any, value: Any, trace: Any) -> None:
        """Pass an interruption from this thread's event loop to the job."""
        if isinstance(kind, type) and issubclass(kind, JobInterrupt):
            self._hub.loop.run_callback(self.greenlet.throw, JobInterrupt)
        else:
            type(self._hub).handle_error(self._hub, context, kind, value, trace)

    def _unseal(self) -> None:
        """Allow interruptions; raise an interruption that was requested before the job."""
        ident = self.ident
        self._sealed = False
        if self._wanted:
            self._delivered = True
            cancel_raise(ident)
            raise JobInterrupt

    def _seal(self) -> None:
        """Forbid interruptions. After this call, the thread does not raise JobInterrupt."""
        # The loop's thread sets `_interrupting` before it checks `_sealed`. This thread sets
        # `_sealed` before it checks `_interrupting`. In either order, at least one thread sees the
        # value that the other has set. `cancel_raise` cancels an interruption that is still due.
        # The loop drops an interruption that arrives here, because the job has ended.
        while True:
            try:
                self._sealed = True
                while self._interrupting:
                    sleep(0)
                cancel_raise(self.ident)
                return
            except JobInterrupt:
                continue


def job_frames() -> dict[int, FrameType]:
    """Return the stacks of the jobs that run in threads, by the `id` of their messages."""
    current = sys._current_frames()
    frames = {}
    for thread in list(_JobThread.all):
        # A job that waits through gevent is in a greenlet that does not run.
        for frame in (getattr(thread.greenlet, "gr_frame", None), current.get(thread.ident)):
            message = _message_in(frame)
            if message is not None and frame is not None:
                frames[id(message)] = frame
    return frames


def _message_in(frame: FrameType | None) -> Message | None:
    while frame is not None:
        if frame.f_code is _JobThread._attempt.__code__:
            work = frame.f_locals.get("work")
            return work.message if isinstance(work, _Work) else None
        frame = frame.f_back
    return None
