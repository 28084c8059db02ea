"""Runs the programs that coroutines start with `asyncio.create_subprocess_exec` and `_shell`.

gevent collects all children of the process on the worker's event loop. So that loop starts the
program and reports its end, and only the pipes belong to the asyncio loop.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from asyncio.base_subprocess import BaseSubprocessTransport
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from qdo.system.home_loop import at_home

STREAMS = ("stdin", "stdout", "stderr")


class ProgramTransport(BaseSubprocessTransport):
    """The pipes of a program that is already started."""

    def __init__(self, process: Any, *args: Any, **options: Any) -> None:
        self._started = process
        super().__init__(*args, **options)

    def _start(self, *args: Any, **options: Any) -> None:
        self._proc: Any = self._started


async def program_transport(
    loop: asyncio.AbstractEventLoop,
    protocol: Any,
    args: Any,
    shell: bool,
    *pipes: Any,
    extra: Any = None,
    **options: Any,
) -> ProgramTransport:
    """Start a program, and return its transport once its pipes are connected.

    :param pipes: stdin, stdout, stderr and bufsize.
    """
    given = dict(zip(STREAMS, pipes[:3], strict=True))
    own: dict[str, Any] = {}
    ended: asyncio.Future[int] = loop.create_future()
    with ExitStack() as undo, ExitStack() as theirs:
        for name, stream in given.items():
            if stream == subprocess.PIPE:
                own[name], given[name] = _pipe(name == "stdin", undo, theirs)
        start = partial(_start, loop, ended, args, shell=shell, **given, **options)
        process: Any = await loop.run_in_executor(None, at_home, start)
        undo.pop_all()
    for name, file in own.items():
        setattr(process, name, file)
    connected = loop.create_future()
    transport = ProgramTransport(
        process, loop, protocol, args, shell, *pipes, waiter=connected, extra=extra
    )
    ended.add_done_callback(lambda done: transport._process_exited(done.result()))
    try:
        await connected
    except BaseException:
        transport.close()
        raise
    return transport


def _start(
    loop: asyncio.AbstractEventLoop, ended: asyncio.Future[int], args: Any, **options: Any
) -> Any:
    process: Any = subprocess.Popen(args, **options)

    def report(process: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set_result, process.returncode)

    process.rawlink(report)
    return process


def _pipe(writes: bool, undo: ExitStack, theirs: ExitStack) -> tuple[Any, int]:
    """Return this end of a new pipe as a file, and the descriptor of the program's end."""
    # The pipes that gevent's Popen makes would belong to the worker's event loop.
    reading, writing = os.pipe()
    own, other = (writing, reading) if writes else (reading, writing)
    theirs.callback(os.close, other)
    return undo.enter_context(os.fdopen(own, "wb" if writes else "rb", 0)), other
