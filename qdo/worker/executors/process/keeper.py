"""The parent of a job's process, between it and the worker process: it leaves nothing behind.

A job may start programs, and these may start others, in groups and sessions of their own. The
keeper adopts all orphans among them (`PR_SET_CHILD_SUBREAPER`). So when the job's process has
ended, every process that it left is a child of the keeper sooner or later: the keeper kills its
children until it has none, and only then ends itself, in the same way as the job's process.

The worker process sends the keeper `END` to kill the job. The kernel sends it, too, when the worker
process dies. The keeper runs no code of the app.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterable
from types import FrameType

from qdo.system.processes import LINUX, adopt_orphans, children, die_with_parent, set_name

END = signal.SIGUSR2 if LINUX else signal.SIGKILL
"""Kills the job. Not SIGTERM, which init systems send to every process of a service."""
NAME = "qdo-keeper"
"""The name of the process, by which the parent of a dead worker process finds its keepers."""


def keep(worker: int, fds: Iterable[int]) -> None:
    """Fork; return in the job's process, and stay in the keeper until everything has ended.

    Each of the two leads a process group of its own, in the session of the worker process.
    Elsewhere than on Linux, nothing is forked, and the parent kills the group of its worker.

    :param worker: the worker process.
    :param fds: descriptors of the job's process, which the keeper closes.
    """
    if not LINUX:
        _exit_unless(die_with_parent(worker))
        return
    os.setpgid(0, 0)
    adopt_orphans()
    _exit_unless(die_with_parent(worker, END))
    keeper, name = os.getpid(), set_name(NAME)
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        set_name(name)
        _exit_unless(die_with_parent(keeper))
        return

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job, signal.SIGKILL)

    # Until here, END ends the keeper, and with it the job's process, which has not begun.
    signal.signal(END, end)
    for fd in fds:
        os.close(fd)
    _end_as(_watch(job))


def _watch(job: int) -> int:
    """Reap orphans until the job's process ends, then kill and reap all others.

    :return: the exit code of the job's process, negative for a signal.
    """
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid == job:
            break
        if ended is not None:
            os.waitpid(ended.si_pid, 0)
    # Its group first, at one blow: a process that forks without end could outrun what follows.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job, signal.SIGKILL)
    signal.signal(END, _ignore)
    code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    while True:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code


def _end_as(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the job's own is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _exit_unless(alive: bool) -> None:
    if not alive:
        os._exit(1)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the job has ended, and what it left is about to."""
