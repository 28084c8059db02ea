"""A command that runs while a condition holds, and ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from qdo.system.processes import die_with_parent
from qdo.system.python import module_argv

KILL_SECONDS = 10.0
"""Time for a command to end after SIGTERM, before SIGKILL."""
_LOOK_SECONDS = 0.1
_CANNOT_RUN = 126
"""What a shell returns for a command that it cannot run."""


def run_bound(
    argv: Sequence[str],
    holds: Callable[[], bool],
    environ: Mapping[str, str],
    kill_seconds: float = KILL_SECONDS,
) -> int:
    """Run a command to its end; return its exit code, 128 + N if signal N ended it.

    It receives SIGTERM once the condition does not hold, and SIGKILL `kill_seconds` later. On
    Linux it also receives SIGTERM if this process is killed. SIGTERM and SIGHUP of this process
    are passed on; Ctrl-C reaches the command from the terminal. Call this in the main thread.

    :param holds: the condition, asked every 0.1 s.
    :raises OSError: no process can be started.
    """
    parent = str(os.getpid())
    ended_at_signal = False
    process = subprocess.Popen([*module_argv(__name__), parent, *argv], env=environ)
    with _passed_on(process):
        while True:
            try:
                code = process.wait(kill_seconds if ended_at_signal else _LOOK_SECONDS)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                if ended_at_signal:
                    process.kill()
                elif not holds():
                    ended_at_signal = True
                    process.terminate()


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to a process; end it with the block."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        """Leave it to the command, which the terminal has told as well."""

    handlers = {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGINT: ignore}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()


def _become(parent: int, argv: list[str]) -> int:
    """Replace this process by a command."""
    if not die_with_parent(parent, signal.SIGTERM):
        return 128 + signal.SIGTERM
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]!r}: {error.strerror}\n")
    return _CANNOT_RUN


if __name__ == "__main__":
    sys.exit(_become(int(sys.argv[1]), sys.argv[2:]))
