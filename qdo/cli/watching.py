"""Shows the output of a command again and again, on one screen."""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any, TypeVar

import click

from qdo.cli.durations import parse_duration
from qdo.errors import QdoError, UsageError

LEAST_SECONDS = 0.5
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor."""
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def watch_option(function: _Function) -> _Function:
    """Add -w DURATION, which runs the command again and again until the user types q.

    An error of one run is shown, and does not end the others. Without a terminal the outputs
    follow each other.
    """

    def run(*args: Any, watch: str | None, **options: Any) -> Any:
        if watch is None:
            return function(*args, **options)
        seconds = parse_duration(watch, "--watch")
        if seconds < LEAST_SECONDS:
            raise UsageError(reason=f"--watch must be at least {LEAST_SECONDS:g}s, got {watch!r}")
        if sys.stdout.isatty():
            watch_screen(lambda: function(*args, **options), seconds)
        while True:
            function(*args, **options)
            time.sleep(seconds)

    option = click.option(
        "-w", "--watch", metavar="DURATION", help="Show it again after each DURATION; q ends it."
    )
    return option(update_wrapper(run, function))  # type: ignore[return-value]


def watch_screen(show: Callable[[], None], seconds: float) -> None:
    """Show what a function writes, until the user types q.

    :param show: writes to stdout and stderr.
    """
    with _screen():
        while True:
            lines = _written(show)
            size = shutil.get_terminal_size()
            room = max(1, size.lines - 1)
            footer = f"every {seconds:g} s; q ends it; {time.strftime('%H:%M:%S')}"
            if len(lines) > room:
                footer += f"; {len(lines) - room} more lines do not fit"
            painted = [f"{line}{_REST_OF_LINE}" for line in [*lines[:room], footer]]
            sys.stdout.write(_HOME + "\n".join(painted) + _REST_OF_SCREEN)
            sys.stdout.flush()
            if _quits(seconds):
                raise click.exceptions.Exit(0)


class _Captured(io.StringIO):
    """What a command writes to the terminal."""

    def isatty(self) -> bool:
        return True


def _written(show: Callable[[], None]) -> list[str]:
    written = _Captured()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            show()
        except QdoError as error:
            written.write(f"{error}\n")
    return written.getvalue().splitlines()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Take the terminal's second screen, and keys without Enter where standard input is one."""
    with contextlib.ExitStack() as stack:
        if sys.stdin.isatty():
            import termios
            import tty

            before = termios.tcgetattr(sys.stdin)
            stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)
            tty.setcbreak(sys.stdin)
        stack.callback(lambda: (sys.stdout.write(_END), sys.stdout.flush()))
        signal.signal(signal.SIGTERM, _terminate)
        sys.stdout.write(_BEGIN)
        yield


def _terminate(number: int, frame: object) -> None:
    raise click.exceptions.Exit(128 + number)


def _quits(seconds: float) -> bool:
    """Wait; return whether the user typed q."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
            return False
        if select.select([sys.stdin], [], [], left)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b""):
                return True
    return False
