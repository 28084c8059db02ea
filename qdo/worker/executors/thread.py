"""Runs jobs in native threads, for libraries that block and code that computes.

One thread per job under way, made when needed and kept; there are never more than jobs under
way at once, that is `concurrency`.

A job is interrupted by an exception that the interpreter raises in its thread at the next step of
Python. That must never hit the thread after its job: see `_Lane._seal`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gevent
from gevent import monkey

from qdo.message import Message
from qdo.worker.executors.base import Executor, JobCall, JobInterrupt
from qdo.worker.executors.native import (
    Mailbox,
    Pending,
    allocate_lock,
    leave_gevent,
    native_sleep,
    raise_in_thread,
    start_thread,
    take_back,
)
from qdo.worker.executors.waiting import Wait

if TYPE_CHECKING:
    from qdo.app import Job, JobFunction

ROUSE_SECONDS = 0.02
"""How long the event loop of a job's thread may take to show that the job waits in it."""


class ThreadExecutor(Executor):
    """A pool of native threads."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._running = 0
        self._idle: list[_Lane] = []

    def bind(self, job: Job) -> JobCall:
        """Return a call that hands the message to a thread and waits for it."""

        def call(message: Message, context: Any) -> None:
            if job.timeout_seconds is not None:
                message.limit(job.timeout_seconds)
            lane = self._idle.pop() if self._idle else _Lane(self._mailbox)
            self._running += 1
            try:
                pending = lane.begin(job.function, message, context)
                Wait(job, message, pending, lane.interrupt, JobInterrupt).run()
            finally:
                self._running -= 1
                if lane.interrupted:
                    lane.end()
                else:
                    self._idle.append(lane)

        return call

    def under_way(self) -> int:
        """Return how many jobs run now."""
        return self._running

    def close(self) -> None:
        """End the idle threads; one whose job never ends goes with the process."""
        for lane in self._idle:
            lane.end()
        self._idle.clear()
        if not self._running:
            self._mailbox.close()


class _Lane:
    """A native thread that runs one job after the other, until one was interrupted."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._work: tuple[JobFunction, Message, Any, Pending] | None = None
        self._wake = allocate_lock()
        self._wake.acquire()
        self._sealed = True
        self._wanted = False
        self._delivered = False
        self._interrupting = False
        self._serial = 0
        self._hub: Any = None
        self._greenlet: Any = None
        self._ident: int = start_thread(self._run, ())

    # --- on the event loop's thread ---

    @property
    def interrupted(self) -> bool:
        """Whether its last job was told to end; its thread is not used again then."""
        return self._wanted

    def begin(self, function: JobFunction, message: Message, context: Any) -> Pending:
        pending = Pending(self._mailbox)
        self._work = function, message, context, pending
        self._serial += 1
        self._wanted = self._delivered = False
        self._wake.release()
        return pending

    def interrupt(self) -> None:
        """Raise JobInterrupt in the job, unless it has ended.

        Code that waits in gevent's manner, as patched libraries do, waits in its thread's own
        event loop: that loop raises it. Where it does not turn, the job is at work.
        """
        self._wanted = True
        self._delivered = False
        if self._hub is None:
            self._strike(self._serial)
        else:
            self._hub.loop.run_callback_threadsafe(self._rouse, self._serial)
            gevent.spawn_later(ROUSE_SECONDS, self._strike, self._serial)

    def _strike(self, serial: int) -> None:
        """Have the interpreter raise it at the next step of Python."""
        self._interrupting = True
        if not self._sealed and not self._delivered and serial == self._serial:
            self._delivered = True
            raise_in_thread(self._ident, JobInterrupt)
        self._interrupting = False

    def end(self) -> None:
        """End the thread, which must be idle."""
        self._work = None
        self._wake.release()

    # --- on its own thread ---

    def _run(self) -> None:
        if monkey.is_module_patched("socket"):
            hub: Any = gevent.get_hub()
            hub.handle_error = self._on_loop_error
            self._greenlet, self._hub = gevent.getcurrent(), hub
        try:
            while True:
                self._wake.acquire()
                work, self._work = self._work, None
                if work is None:
                    return
                self._attempt(*work)
                del work
        finally:
            leave_gevent()

    def _attempt(
        self, function: JobFunction, message: Message, context: Any, pending: Pending
    ) -> None:
        error: BaseException | None = None
        try:
            try:
                self._unseal()
                function(message, context)
            except BaseException as raised:  # noqa: BLE001 - the waiting greenlet raises it
                error = raised
            self._seal()
        except JobInterrupt as late:
            # It came between the end of the job and the seal: nobody can tell any more whether
            # the job returned.
            self._seal()
            error = late if error is None else error
        pending.finish(error)
        error = None

    def _rouse(self, serial: int) -> None:
        """Raise it in the job, which waits: this thread's event loop calls."""
        if not self._sealed and not self._delivered and serial == self._serial:
            self._delivered = True
            self._greenlet.throw(JobInterrupt)

    def _on_loop_error(self, context: Any, kind: Any, value: Any, trace: Any) -> None:
        """Pass on an interruption that hit this thread's event loop while the job waited in it."""
        if isinstance(kind, type) and issubclass(kind, JobInterrupt):
            self._hub.loop.run_callback(self._greenlet.throw, JobInterrupt)
        else:
            type(self._hub).handle_error(self._hub, context, kind, value, trace)

    def _unseal(self) -> None:
        """Open the job to interruptions, and raise one that was wanted before it began."""
        ident = self._ident
        self._sealed = False
        if self._wanted:
            self._delivered = True
            take_back(ident)
            raise JobInterrupt

    def _seal(self) -> None:
        """Close the job to interruptions: none comes after this has returned.

        The loop's thread says that it interrupts before it looks whether that is still allowed;
        this thread forbids it before it looks whether somebody is about to. Whichever is first,
        both see it. What was asked for and not raised yet is taken back; what is raised just
        here is dropped, for the job has ended.
        """
        while True:
            try:
                self._sealed = True
                while self._interrupting:
                    native_sleep(0)
                take_back(self._ident)
                return
            except JobInterrupt:
                continue
