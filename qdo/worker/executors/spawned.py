"""A job's process as its worker process sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from typing import Any

import gevent
from gevent import socket as cooperative_sockets
from gevent import subprocess as cooperative_processes

from qdo.message import Message
from qdo.settings import Settings
from qdo.stopping import SIGN
from qdo.worker.executors import wire
from qdo.worker.executors.runner import VARIABLE
from qdo.worker.slot import JobAborted

ARGV = (sys.executable, "-m", "qdo.worker.executors.runner")
START_SECONDS = 60.0
"""How long it may take to import the app and enter its context."""
LEAVE_SECONDS = 5.0
"""How long it may take to leave the context once it is told to end."""
BURY_SECONDS = 1.0
"""How long a process that closed its channel may take to end by itself."""
LOOK_SECONDS = 0.05
"""How often the memory of a process with a limit is looked at while it runs a job."""
_sockets: Any = cooperative_sockets
_processes: Any = cooperative_processes
_MIB = 1 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Gone(Exception):
    """The process closed its channel, or said what makes no sense: it is of no more use."""


class TooLarge(Exception):
    """The process takes more memory than its job may."""


class Spawned:
    """A process that runs one job, for one message at a time.

    :ivar served: messages it was given.
    :raises OSError: it cannot be started.
    """

    def __init__(self, settings: Settings, target: str, queues: str) -> None:
        self.served = 0
        self._channel, theirs = _sockets.socketpair()
        sign = SIGN.share()
        told = {
            "settings": dataclasses.asdict(settings),
            "target": target or None,
            "queues": queues,
            "channel": theirs.fileno(),
            "sign": sign,
            "parent": os.getpid(),
        }
        try:
            self._process = _processes.Popen(
                ARGV,
                stdin=_processes.DEVNULL,
                env={**os.environ, VARIABLE: json.dumps(told)},
                pass_fds=(theirs.fileno(), sign),
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid)

    def await_ready(self) -> None:
        """Wait until it has imported the app and entered its context.

        :raises Gone: it could not, or took too long.
        """
        self._channel.settimeout(START_SECONDS)
        try:
            head = self._read()
        except TimeoutError:
            raise Gone(f"it was not ready after {START_SECONDS:g} s") from None
        finally:
            self._channel.settimeout(None)
        if not head.get("ready"):
            raise Gone(str(head.get("failed", "it did not say that it is ready"))[:1000])

    def give(self, message: Message) -> None:
        """Send it a message.

        :raises OSError: it is dead; nothing of the message was run.
        """
        self.served += 1
        self._channel.sendall(wire.pack_message(message, self.served))

    def answer(self, memory_mib: int | None) -> dict[str, Any]:
        """Wait for its answer to the message.

        :raises Gone: it died.
        :raises TooLarge: its memory has grown over the limit.
        """
        self._channel.settimeout(None if memory_mib is None else LOOK_SECONDS)
        head = self._read(memory_mib)
        if head.get("serial") != self.served:
            raise self._babbled("it is to another message")
        return head

    def _read(self, memory_mib: int | None = None) -> dict[str, Any]:
        def receive(size: int) -> bytes:
            while True:
                try:
                    return bytes(self._channel.recv(size))
                except TimeoutError:
                    if memory_mib is None:
                        raise
                    self._look(memory_mib)

        try:
            frame = wire.read(receive, wire.ANSWER_LIMIT)
        except ConnectionError as error:
            raise Gone("its channel broke") from error
        except wire.WireError as error:
            raise self._babbled(str(error)) from error
        if frame is None:
            raise Gone("its channel was closed")
        return frame[0]

    def _babbled(self, what: str) -> Gone:
        """Kill it: its job got hold of the channel, nothing it says can be believed."""
        self._process.kill()
        return Gone(f"it said what is no answer: {what}")

    def _look(self, memory_mib: int) -> None:
        if self.is_over(memory_mib):
            raise TooLarge

    def is_over(self, memory_mib: int) -> bool:
        """Return whether its resident memory is over a limit."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                pages = int(file.read().split()[1])
        except OSError:
            return False
        return pages * _PAGE_BYTES > memory_mib * _MIB

    # --- its end ------------------------------------------------------------------------

    def bury(self) -> str:
        """See a dead process to its end; return how it ended, in words."""
        try:
            with gevent.Timeout(BURY_SECONDS, False):
                self._process.wait()
        except JobAborted:
            self.kill()
            raise
        # One that closed its channel may well go on without it.
        went_on = self._process.poll() is None
        code = self.kill()
        if went_on:
            return "it closed its channel to the worker and was killed"
        if code >= 0:
            return f"it ended with exit code {code}"
        return f"it died of {signal.Signals(-code).name}"

    def kill(self) -> int:
        """Kill it and return its exit code; nothing of it runs when this returns."""
        aborted: JobAborted | None = None
        self._process.kill()
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
        """Tell it to end, and kill it where it does not."""
        self._channel.close()
        with gevent.Timeout(LEAVE_SECONDS, False):
            self._process.wait()
        self.kill()
