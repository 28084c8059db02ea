"""Judge queues for a command: its options, its readings, and --watch."""

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

from qdo.cli.connections import open_connections
from qdo.cli.output import parse_duration, print_message
from qdo.errors import QdoError, UsageError
from qdo.ops.status import Statuses, queue_statuses
from qdo.ops.verdicts import RULES, VerdictRules
from qdo.sending.connections import Connections
from qdo.settings.settings import Settings
from qdo.text import pluralize

SHARED = ("app", "broker", "coordinator", "namespace", "connect_seconds")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def reading_options(function: _Function) -> _Function:
    """Add the options that `read_queues` takes."""
    for option in (
        click.option(
            "--budget",
            metavar="N",
            type=click.IntRange(min=0),
            help="Request at most N backlogs from brokers that need a request for each, SQS and"
            " Kinesis (default 100): first of failing queues, then of those without an owner, then"
            " of those that are behind for longest.",
        ),
        click.option(
            "--window",
            metavar="DURATION",
            default="0s",
            help="Read twice, this far apart: only then a queue can be catching-up or rewound.",
        ),
    ):
        function = option(function)
    return verdict_options(function)


def verdict_options(function: _Function) -> _Function:
    """Add the options that `rules_of` takes."""
    for option in (
        click.option(
            "--late",
            metavar="DURATION",
            default=f"{RULES.late_seconds:g}s",
            show_default=True,
            help="A queue lags if its next message is this old.",
        ),
        click.option(
            "--stuck",
            metavar="DURATION",
            default=f"{RULES.stuck_seconds:g}s",
            show_default=True,
            help="A queue is stuck if one message runs for so long.",
        ),
    ):
        function = option(function)
    return function


def rules_of(late: str, stuck: str) -> VerdictRules:
    """Return the rules with these durations.

    :raises UsageError: one is not a duration.
    """
    return VerdictRules(parse_duration(late, "--late"), parse_duration(stuck, "--stuck"))


def read_queues(settings: Settings, glob: str, budget: int | None, window: str) -> list[Statuses]:
    """Read the queues once, or twice with some time between.

    :raises UsageError: `window` is not a duration.
    """
    pause = parse_duration(window, "--window")
    with open_connections(settings) as connections:
        return read_opened(connections, glob, budget, pause)


def read_opened(
    connections: Connections, glob: str, budget: int | None, pause: float
) -> list[Statuses]:
    """Read the queues once; twice with some seconds between, unless `pause` is 0."""

    def read() -> Statuses:
        return queue_statuses(
            connections.client,
            connections.layout,
            connections.broker,
            glob,
            budget,
            connections.broker_fault,
        )

    readings = [read()]
    if pause:
        time.sleep(pause)
        readings.append(read())
    return readings


def report_unasked(statuses: Statuses) -> None:
    """Tell on stderr what the broker was not asked for."""
    if statuses.unasked:
        print_message(
            f"{statuses.unasked} of {pluralize(len(statuses.queues), 'backlog')} were not"
            " requested, because each needs a request; failing queues, queues without a worker"
            " and those longest without progress come first; --budget N requests more"
        )
    for what, reason in statuses.unread.items():
        print_message(f"cannot read {what}: {reason}")


LEAST_SECONDS = 0.5
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor."""
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


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
