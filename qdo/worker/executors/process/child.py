"""A job's process, seen from the worker process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from typing import Any

import gevent
from gevent import socket as cooperative_sockets
from gevent import subprocess as cooperative_processes

from qdo.message import Message
from qdo.settings.settings import Settings
from qdo.settings.values import PASSWORD_VARIABLE
from qdo.system.processes import descendants, memory_bytes
from qdo.system.python import module_argv
from qdo.system.stop_flag import SIGN
from qdo.worker.executors.base import JobAborted
from qdo.worker.executors.process import frames as wire
from qdo.worker.executors.process.frames import VARIABLE
from qdo.worker.executors.process.keeper import END
from qdo.worker.process_title import process_title

ARGV = module_argv("qdo.worker.executors.process.main")
START_SECONDS = 60.0
"""How long a process may take to import the app and enter its context."""
LEAVE_SECONDS = 5.0
"""How long a process may take to leave the context when the worker ends it."""
REAP_SECONDS = 1.0
"""How long a process that closed its channel may take to exit by itself."""
LOOK_SECONDS = 0.05
"""How often the memory of a process with a limit is checked while it runs a job."""
LOOK_SHARE = 0.02
"""Share of the time that these checks may take: a job may start hundreds of processes."""
_sockets: Any = cooperative_sockets
_processes: Any = cooperative_processes
_MIB = 1 << 20


def _environment(settings: Settings) -> dict[str, str]:
    """Return the environment for a job, without the password of the coordinator.

    Its code, and the programs that it starts, would get the rights of the worker. Only senders
    with a doorbell connect to the coordinator.
    """
    kept = dict(os.environ)
    if not settings.doorbell:
        kept.pop(PASSWORD_VARIABLE, None)
    return kept


class ProcessExited(Exception):
    """The process closed its channel, or sent an invalid answer: it cannot be used again."""


class MessageUnread(ProcessExited):
    """The process died before it had read all of its message: the job did not run for it."""


class TooLarge(Exception):
    """The process uses more memory than its job's limit."""


class JobProcess:
    """A process that runs one job, for one message at a time, and its keeper.

    :ivar served: messages sent to it.
    :ivar pid: its process id, that of the keeper until it is ready.
    :raises OSError: it cannot be started.
    """

    def __init__(self, settings: Settings, target: str, queues: str) -> None:
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
        """Wait until the process has imported the app and entered its context.

        :raises ProcessExited: it could not, or took too long.
        """
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
        """Send a message to the process.

        :raises OSError: it is dead; the job did not run.
        """
        self.served += 1
        self._channel.sendall(wire.pack_message(message, self.served))

    def answer(self, memory_mib: int | None) -> dict[str, Any]:
        """Wait for the answer to the message.

        :raises MessageUnread: the process died before the job began.
        :raises ProcessExited: the process died, or its answer is invalid.
        :raises TooLarge: its memory has grown over the limit.
        """
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
            # Linux resets a socket pair when one end is closed and has bytes that were not read.
            # Otherwise, the other end only reads the end of the stream.
            raise MessageUnread("it had not read its message") from error
        except wire.WireError as error:
            raise self._invalid(str(error)) from error
        if frame is None:
            raise ProcessExited("its channel was closed")
        return frame[0]

    def _invalid(self, what: str) -> ProcessExited:
        """Kill the process: its job wrote to the channel, and no answer can be trusted."""
        self._end()
        return ProcessExited(f"it sent an invalid answer: {what}")

    def _check_memory(self, memory_mib: int) -> None:
        began = time.perf_counter()
        if self.is_over(memory_mib):
            raise TooLarge
        took = time.perf_counter() - began
        self._channel.settimeout(max(LOOK_SECONDS, took / LOOK_SHARE))

    def is_over(self, memory_mib: int) -> bool:
        """Return whether it and all that it has started use more memory than a limit."""
        limit = memory_mib * _MIB
        return memory_bytes(descendants(self._process.pid), limit) > limit

    # --- its end ------------------------------------------------------------------------

    def reap(self) -> str:
        """Wait for a dying process, or kill it; describe how it ended."""
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
        """Kill the process and all that it has started; return its exit code.

        They have ended when this returns.
        """
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
        """Ask the process to end, and kill it if it does not."""
        self._channel.close()
        with gevent.Timeout(LEAVE_SECONDS, False):
            self._process.wait()
        self.kill()
