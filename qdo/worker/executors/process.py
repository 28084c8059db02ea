"""Run jobs in child processes, for code that computes, leaks, crashes or is untrusted.

Each job has separate processes: one for each message in flight, at most `executor_processes`. The
executor starts processes on demand and reuses them. The executor kills a process when the message
times out, when the process uses more than `memory_mib`, or when the worker aborts. The code of the
job cannot prevent the kill. The attempt ends only when all descendants of the process have ended
(see the keeper in `process_frames`). Then the executor starts another process for the next message.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gevent
import gevent.fileobject  # gevent.subprocess would import it at the first start of a process
from gevent import socket as cooperative_sockets
from gevent import subprocess as cooperative_processes
from gevent.lock import BoundedSemaphore

from qdo.errors import BodyDecodeError, JobCrashedError
from qdo.message import Message
from qdo.settings.hosts import process_title
from qdo.settings.settings import Settings
from qdo.settings.values import PASSWORD_VARIABLE
from qdo.system.processes import SIGN, descendants, memory_bytes, module_argv
from qdo.text import describe, one_line, pluralize
from qdo.worker.executors import process_frames as wire
from qdo.worker.executors.base import (
    START_SECONDS,
    Executor,
    JobAborted,
    JobCall,
    NotStarted,
    OnStart,
    timed_out,
)
from qdo.worker.executors.process_frames import END, VARIABLE
from qdo.worker.executors.wait import started

if TYPE_CHECKING:
    from qdo.jobs.job import Job


_log = logging.getLogger(__name__)

ARGV = module_argv("qdo.worker.executors.process_main")
# Maximum seconds for leaving the job context when the worker ends a process.
LEAVE_SECONDS = 5.0
# Maximum seconds until a process that closed its channel exits by itself.
REAP_SECONDS = 1.0
# Minimum seconds between memory checks of a running process with a memory limit.
LOOK_SECONDS = 0.05
# Maximum share of time for memory checks. A job may start hundreds of processes.
LOOK_SHARE = 0.02
_sockets: Any = cooperative_sockets
_processes: Any = cooperative_processes
_MIB = 1 << 20


def _environment(settings: Settings) -> dict[str, str]:
    kept = dict(os.environ)
    if not settings.doorbell:
        # With the password, a job and its programs would get the worker's rights. A job needs the
        # password only to send with a doorbell.
        kept.pop(PASSWORD_VARIABLE, None)
    return kept


class ProcessExited(Exception):
    """The process closed its channel or sent an invalid answer, and is no longer usable."""


class MessageUnread(ProcessExited):
    """The process died before it had read its whole message, so the job did not run."""


class TooLarge(Exception):
    """The process uses more memory than its job's limit."""


class JobProcess:
    """A process that runs one job, one message at a time, and the keeper of the process.

    :ivar served: number of messages sent to the process.
    :ivar pid: the process id; the id of the keeper until the process is ready.
    """

    def __init__(self, settings: Settings, target: str, queues: str, folder: str) -> None:
        self.served = 0
        self._channel, theirs = _sockets.socketpair()
        sign = SIGN.share()
        parameters = {
            "settings": dataclasses.asdict(settings),
            "target": target or None,
            "queues": queues,
            "channel": theirs.fileno(),
            "sign": sign,
            "parent": os.getpid(),
        }
        try:
            self._process = _processes.Popen(
                [*ARGV, process_title(f"job {queues}", settings, target)],
                stdin=_processes.DEVNULL,
                cwd=folder,
                env={**_environment(settings), VARIABLE: json.dumps(parameters)},
                pass_fds=(theirs.fileno(), sign),
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self.pid: int = self._process.pid

    def await_ready(self) -> None:
        """Wait until the process has entered the job context; raise ProcessExited on failure."""
        self._channel.settimeout(START_SECONDS)
        try:
            head = self._read()
        except TimeoutError:
            raise ProcessExited(f"it was not ready within {START_SECONDS:g} s") from None
        finally:
            self._channel.settimeout(None)
        if not head.get("ready"):
            raise ProcessExited(
                str(head.get("failed", "its first frame did not report that it is ready"))[:1000]
            )
        if isinstance(head.get("pid"), int):
            self.pid = head["pid"]

    def give(self, message: Message) -> None:
        """Send a message to the process; raise OSError if the process died before the job ran."""
        self.served += 1
        self._channel.sendall(wire.pack_message(message, self.served))

    def answer(self, memory_mib: int | None) -> dict[str, Any]:
        """Wait for the answer to a message; raise MessageUnread, ProcessExited or TooLarge."""
        self._channel.settimeout(None if memory_mib is None else LOOK_SECONDS)
        head = self._read(memory_mib)
        if head.get("serial") != self.served:
            raise self._invalid("it answers another message")
        return head

    def _read(self, memory_mib: int | None = None) -> dict[str, Any]:
        def receive(size: int) -> bytes:
            while True:
                try:
                    return bytes(self._channel.recv(size))
                except TimeoutError:
                    if memory_mib is None:
                        raise
                    self._check_memory(memory_mib)

        try:
            frame = wire.read(receive, wire.ANSWER_LIMIT)
        except ConnectionError as error:
            # If the process closes its end with unread bytes, Linux resets the socket pair. Without
            # unread bytes, this end reads the end of the stream.
            raise MessageUnread("it had not read its message") from error
        except wire.WireError as error:
            raise self._invalid(str(error)) from error
        if frame is None:
            raise ProcessExited("its channel was closed")
        return frame[0]

    def _invalid(self, what: str) -> ProcessExited:
        self._end()  # the job wrote to the channel, so do not trust any answer
        return ProcessExited(f"it sent an invalid answer: {what}")

    def _check_memory(self, memory_mib: int) -> None:
        began = time.perf_counter()
        if self.is_over(memory_mib):
            raise TooLarge
        took = time.perf_counter() - began
        self._channel.settimeout(max(LOOK_SECONDS, took / LOOK_SHARE))

    def is_over(self, memory_mib: int) -> bool:
        """Return whether the process and its descendants use more memory than a limit."""
        limit = memory_mib * _MIB
        return memory_bytes(descendants(self._process.pid), limit) > limit

    def reap(self) -> str:
        """Wait for the end of a dying process, or kill it; return how the process ended."""
        try:
            with gevent.Timeout(REAP_SECONDS, False):
                self._process.wait()
        except JobAborted:
            self.kill()
            raise
        # A process that closed its channel may still be running.
        alive = self._process.poll() is None
        code = self.kill()
        if alive:
            return "it closed its channel to the worker and was killed"
        if code >= 0:
            return f"it exited with code {code}"
        return f"it died of {signal.Signals(-code).name}"

    def _end(self) -> None:
        self._process.send_signal(END)
        self._process.send_signal(signal.SIGCONT)  # a stopped keeper could not kill anything

    def kill(self) -> int:
        """Kill the process and its descendants, and wait for their end; return the exit code."""
        aborted: JobAborted | None = None
        self._end()
        while True:
            try:
                code = int(self._process.wait())
                break
            except JobAborted as error:
                aborted = error
        self._channel.close()
        if aborted is not None:
            raise aborted
        return code

    def leave(self) -> None:
        """Ask the process to end, and kill the process after a timeout."""
        self._channel.close()
        with gevent.Timeout(LEAVE_SECONDS, False):
            self._process.wait()
        self.kill()


class ProcessExecutor(Executor):
    """Runs jobs in processes; see `ExecutorRouter` for the other parameters.

    :param folder: the working directory of the processes. A job may have changed the worker's
      directory.
    """

    def __init__(
        self, settings: Settings, target: str, folder: str, may_start: Callable[[Message], bool]
    ) -> None:
        self._settings = settings
        self._target = target
        self._folder = folder
        self._may_start = may_start
        self._bound: list[_JobProcesses] = []

    def bind(self, job: Job, on_start: OnStart | None = None) -> JobCall:
        """Return a call that sends a message to a process and waits for the answer."""
        processes = _JobProcesses(
            job,
            lambda: JobProcess(self._settings, self._target, job.queues, self._folder),
            self._settings.executor_processes,
            self._may_start,
            on_start,
        )
        self._bound.append(processes)

        def call(message: Message, context: Any) -> None:
            processes.run(message)

        return call

    def under_way(self) -> int:
        return sum(each.under_way for each in self._bound)

    def close(self) -> None:
        """End every process; idle processes leave the job context first."""
        gevent.joinall([gevent.spawn(each.close) for each in self._bound])


class _JobProcesses:
    """The processes of one job."""

    def __init__(
        self,
        job: Job,
        start: Callable[[], JobProcess],
        limit: int,
        may_start: Callable[[Message], bool],
        on_start: OnStart | None,
    ) -> None:
        self.under_way = 0
        self._on_start = on_start
        self._job = job
        self._start = start
        self._may_start = may_start
        self._permits = BoundedSemaphore(limit)
        self._idle: list[JobProcess] = []
        self._leaving: set[Any] = set()

    def run(self, message: Message) -> None:
        """Run the job for a message; raise the error of a failed attempt."""
        with self._permits:
            self.under_way += 1
            try:
                error = self._attempt(message)
            finally:
                self.under_way -= 1
        if error is not None:
            raise error

    def close(self) -> None:
        """End the idle processes, and wait for all ending processes."""
        while self._idle:
            self._end(self._idle.pop())
        gevent.joinall(list(self._leaving))

    def _attempt(self, message: Message) -> BaseException | None:
        seconds = self._job.timeout_seconds
        on_start = self._on_start
        while True:
            spawned = self._take(message)
            over = gevent.Timeout(seconds)
            try:
                if seconds is not None:
                    message.limit(seconds)
                    over.start()
                try:
                    spawned.give(message)
                except OSError as error:
                    self._log_dead(spawned, error)
                    continue
                if on_start is not None:
                    on_start(message)
                    on_start = None
                answer = spawned.answer(self._job.memory_mib)
            except ProcessExited as error:
                over.close()
                # Count the attempt if the process was new, because the message may kill every
                # process that reads it.
                if isinstance(error, MessageUnread) and spawned.served > 1:
                    self._log_dead(spawned, error)
                    continue
                return self._crashed(message, f"{spawned.reap()} ({error})", error)
            except TooLarge as error:
                over.close()
                spawned.kill()
                reason = f"it used more than its memory_mib, {self._job.memory_mib} MiB"
                return self._crashed(message, reason, error)
            except BaseException as error:
                over.close()
                spawned.kill()
                if error is over:
                    return timed_out(self._job, message)
                raise
            finally:
                over.close()
            self._keep(spawned)
            if "not_started" in answer:
                continue
            if "undecodable" in answer:
                reason = one_line(answer["undecodable"])
                return BodyDecodeError(queue=message.queue, id=message.id, reason=reason)
            if answer.get("ended") is True:
                message._report_end()
            return wire.load(answer)

    def _log_dead(self, spawned: JobProcess, error: Exception) -> None:
        _log.warning(
            "an idle process of job %s was found dead, trying another: %s (%s)",
            self._job.name,
            spawned.reap(),
            describe(error),
        )

    def _crashed(self, message: Message, reason: str, cause: Exception) -> JobCrashedError:
        error = JobCrashedError(job=self._job.name, id=message.id, reason=reason)
        error.__cause__ = cause
        return error

    def _take(self, message: Message) -> JobProcess:
        if not self._may_start(message):
            raise NotStarted
        return started(
            self._idle_process,
            "a process",
            self._job,
            message,
            self._may_start,
            ProcessExited,
            OSError,
        )

    def _idle_process(self) -> JobProcess | None:
        """Return an idle process; if all are busy, add an idle process and return None."""
        if self._idle:
            return self._idle.pop()
        self._idle.append(self._started())
        return None

    def _started(self) -> JobProcess:
        spawned = self._start()
        try:
            spawned.await_ready()
        except ProcessExited as error:
            raise ProcessExited(f"{spawned.reap()} ({error})") from error
        except BaseException:
            spawned.kill()
            raise
        _log.info("process %d started for job %s", spawned.pid, self._job.name)
        return spawned

    def _keep(self, spawned: JobProcess) -> None:
        """Keep a process for the next message, unless the process has reached a limit."""
        recycle_after = self._job.recycle_after
        memory_mib = self._job.memory_mib
        if recycle_after is not None and spawned.served >= recycle_after:
            served = pluralize(spawned.served, "message")
            _log.info("process %d has run %s; replacing it", spawned.pid, served)
        elif memory_mib is not None and spawned.is_over(memory_mib):
            _log.info("process %d has grown over %d MiB; replacing it", spawned.pid, memory_mib)
        else:
            self._idle.append(spawned)
            return
        self._end(spawned)

    def _end(self, spawned: JobProcess) -> None:
        # End the process in the background, because leaving the context may take `LEAVE_SECONDS`.
        greenlet = gevent.spawn(spawned.leave)
        self._leaving.add(greenlet)
        greenlet.rawlink(self._leaving.discard)
