"""The entry point of a job's process, ``python -m qdo.worker.executors.process_main``.

The worker process passes the parameters as JSON in the environment variable QDO_JOB_PROCESS:
``settings``, ``target`` (MODULE:APP or null), ``queues`` (the glob of the job), and two
descriptors. ``channel`` is the socket to the worker process, and ``sign`` is the page of the stop
flag.

The process imports the app again, without gevent, and enters the app's `job_context` once. Then the
process runs one message after the other until the worker process closes the channel. The process
and its descendants never outlive the worker process, see `process_frames`.

The process ignores SIGTERM and SIGINT, because only the worker process decides its end. An init
system or a terminal may send these signals to every process of the service.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from qdo.app import App
from qdo.jobs.job import Job
from qdo.loading import prepare
from qdo.settings.settings import Settings
from qdo.system import logs as log
from qdo.system.processes import SIGN, reset_signals_in_forks
from qdo.text import describe, one_line
from qdo.worker.executors import process_frames as wire
from qdo.worker.executors.base import NotStarted, check_lease
from qdo.worker.executors.process_frames import VARIABLE, keep


def main() -> int:
    """Run the process with the parameters in its environment; return the exit code."""
    del sys.argv[1:]  # the process title is for `ps`, not for the app
    parameters = json.loads(os.environ[VARIABLE])
    # Processes that the app starts must not inherit the variable, because settings may contain
    # secrets.
    del os.environ[VARIABLE]
    for number in (signal.SIGTERM, signal.SIGINT):
        # Set a handler instead of SIG_IGN, because programs that the job starts would inherit
        # SIG_IGN.
        signal.signal(number, _ignore)
    keep(parameters["parent"], (parameters["channel"], parameters["sign"]))
    reset_signals_in_forks()
    channel = socket.socket(fileno=parameters["channel"])
    channel.setblocking(True)
    os.set_inheritable(channel.fileno(), False)
    SIGN.adopt(parameters["sign"])
    with channel:
        return _run(parameters, channel)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; see the module's docstring."""


def _run(parameters: dict[str, Any], channel: socket.socket) -> int:
    settings = Settings(**parameters["settings"])
    log.set_up(settings.logging)
    try:
        app, _ = prepare(settings, parameters["target"])
        job = app.hooks.composed(_job(app, parameters["queues"]), check_lease)
        manager: AbstractContextManager[Any] = app.hooks.job_context()
        context = manager.__enter__()
    except BaseException as error:  # noqa: BLE001 - the worker process must know of any error
        channel.sendall(wire.pack({"failed": describe(error)}))
        return 1
    with app:
        try:
            channel.sendall(wire.pack({"ready": True, "pid": os.getpid()}))
            _serve(channel, job, context)
        finally:
            manager.__exit__(None, None, None)
    return 0


def _job(app: App, queues: str) -> Job:
    for job in app.jobs:
        if job.queues == queues:
            return job
    raise LookupError(f"app {app.name!r} has no job for {queues!r} when imported in a process")


def _serve(channel: socket.socket, job: Job, context: Any) -> None:
    """Run one message after the other until the worker process closes the channel."""
    own = os.getpid()
    while (frame := wire.read(channel.recv)) is not None:
        head, blob = frame
        try:
            message = wire.message_of(head, blob)
        except (ValueError, RecursionError) as raised:
            answer = {"serial": head["serial"], "undecodable": one_line(raised)}
            channel.sendall(wire.pack(answer))
            continue
        if job.timeout_seconds is not None:
            message.limit(job.timeout_seconds)
        error: BaseException | None = None
        message._ends = ends = list[bool]()
        try:
            check_lease(message)
            job.function(message, context)
        except NotStarted:
            channel.sendall(wire.pack({"serial": head["serial"], "not_started": True}))
            continue
        except BaseException as raised:  # noqa: BLE001 - SystemExit must not end it
            error = raised
        if os.getpid() != own:
            # A forked copy of the job's process must not use the channel.
            os._exit(1)
        channel.sendall(
            wire.pack({"serial": head["serial"], "ended": bool(ends), **wire.dump(error)})
        )
        error = None


if __name__ == "__main__":
    sys.exit(main())
