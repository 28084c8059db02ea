"""Runs the programs that coroutines start with `asyncio.create_subprocess_exec` and `_shell`.

gevent collects all children of the process on the worker's event loop. So that loop starts the
program and reports its end, and only the pipes belong to the asyncio loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from asyncio.base_subprocess import BaseSubprocessTransport
from contextlib import ExitStack
from functools import partial
from typing import Any

from qdo.system.home_loop import at_home

STREAMS = ("stdin", "stdout", "stderr")


async def program_transport(
    loop: asyncio.AbstractEventLoop, protocol: Any, args: Any, shell: bool, **options: Any
) -> _ProgramTransport:
    """Start a program, and return its transport once its pipes are connected."""
    wanted = [options.pop(name) for name in STREAMS]
    extra = options.pop("extra", None)
    program = _Program(loop)
    with ExitStack() as theirs:
        given = {
            name: program.open_pipe(name, theirs) if each == subprocess.PIPE else each
            for name, each in zip(STREAMS, wanted, strict=True)
        }
        start = partial(program.start, args, shell=shell, **given, **options)
        try:
            await loop.run_in_executor(None, at_home, start)
        except BaseException:
            program.close_pipes()
            raise
    connected = loop.create_future()
    transport = _ProgramTransport(
        program, loop, protocol, args, shell, *wanted, 0, waiter=connected, extra=extra
    )
    program.ended.add_done_callback(lambda done: transport._process_exited(done.result()))
    try:
        await connected
    except BaseException:
        transport.close()
        raise
    return transport


class _Program:
    """A started program, with the attributes of a Popen that its transport uses."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: asyncio.Future[int] = loop.create_future()
        self.returncode: int | None = None
        self.pid = 0
        self.stdin: Any = None
        self.stdout: Any = None
        self.stderr: Any = None

    def open_pipe(self, name: str, theirs: ExitStack) -> int:
        """Open a pipe; return the end for the program, which `theirs` closes here."""
        # The pipes that gevent's Popen makes would belong to the worker's event loop.
        reading, writing = os.pipe()
        own, other = (writing, reading) if name == "stdin" else (reading, writing)
        setattr(self, name, os.fdopen(own, "wb" if name == "stdin" else "rb", 0))
        theirs.callback(os.close, other)
        return other

    def close_pipes(self) -> None:
        for each in (self.stdin, self.stdout, self.stderr):
            if each is not None:
                each.close()

    def start(self, args: Any, **options: Any) -> None:
        """Start the program. Call this on the worker's event loop."""
        process: Any = subprocess.Popen(args, **options)
        self.pid = process.pid
        process.rawlink(
            lambda ended: self._loop.call_soon_threadsafe(self.ended.set_result, ended.returncode)
        )

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ProgramTransport(BaseSubprocessTransport):
    def __init__(self, program: _Program, *args: Any, **options: Any) -> None:
        self._program = program
        super().__init__(*args, **options)

    def _start(self, *args: Any, **options: Any) -> None:
        self._proc: Any = self._program
