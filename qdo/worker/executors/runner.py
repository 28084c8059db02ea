"""A job's process: ``python -m qdo.worker.executors.runner``, started by its worker process.

What it needs stands as JSON in the environment variable QDO_EXECUTOR: ``settings``, ``target``
(MODULE:APP or null), ``queues`` (the glob of the job), and two descriptors: ``channel``, the socket
to the worker process, and ``sign``, the page that says whether the worker drains.

It imports the app afresh, without gevent, enters the app's `job_context` once, and then runs one
message after the other until its worker process closes the channel. It never outlives that one:
the kernel kills it when its parent dies.

SIGTERM and SIGINT do nothing here, though an init system or a terminal may send them to every
process of the service: the worker process says when it is time to end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from qdo import log
from qdo.app import App, Job
from qdo.describe import describe
from qdo.loading import prepare
from qdo.settings import Settings
from qdo.stopping import SIGN
from qdo.worker.executors import remote, wire

VARIABLE = "QDO_EXECUTOR"
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the process as its environment says; return the exit code."""
    told = json.loads(os.environ[VARIABLE])
    # The app must not pass it on to processes that it starts: settings may hold secrets.
    del os.environ[VARIABLE]
    if not die_with_parent(told["parent"]):
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        # A handler, not SIG_IGN: that one would be inherited by programs that the job starts.
        signal.signal(number, _not_yet)
    channel = socket.socket(fileno=told["channel"])
    channel.setblocking(True)
    os.set_inheritable(channel.fileno(), False)
    SIGN.adopt(told["sign"])
    with channel:
        return _run(told, channel)


def die_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends (Linux).

    :return: whether the parent still lives.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def _not_yet(number: int, frame: FrameType | None) -> None:
    """Do nothing; see the module's docstring."""


def _run(told: dict[str, Any], channel: socket.socket) -> int:
    settings = Settings(**told["settings"])
    log.configure(settings.log_level)
    try:
        app, _ = prepare(settings, told["target"])
        job = app.composed(_job(app, told["queues"]))
        manager: AbstractContextManager[Any] = app.job_context()
        context = manager.__enter__()
    except BaseException as error:  # noqa: BLE001 - whatever it was, the worker process must know
        channel.sendall(wire.pack({"failed": describe(error)}))
        return 1
    with app:
        try:
            channel.sendall(wire.pack({"ready": True}))
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
    """Run one message after the other, until the channel is closed."""
    own = os.getpid()
    while (frame := wire.read(channel.recv)) is not None:
        head, blob = frame
        message = wire.message_of(head, blob)
        if job.timeout_seconds is not None:
            message.limit(job.timeout_seconds)
        error: BaseException | None = None
        try:
            job.function(message, context)
        except BaseException as raised:  # noqa: BLE001 - SystemExit of a job ends no process
            error = raised
        if os.getpid() != own:
            # The job forked and its copy came back here: it has no business on the channel.
            os._exit(1)
        channel.sendall(wire.pack({"serial": head["serial"], **remote.dump(error)}))
        error = None


if __name__ == "__main__":
    sys.exit(main())
