"""Reads and judges queues for commands, and adds their options, such as --watch."""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qdo.cli.options import PERIOD, duration_option
from qdo.cli.output import print_message
from qdo.errors import QdoError
from qdo.ops.verdicts import RULES, VerdictRules
from qdo.text import pluralize

if TYPE_CHECKING:
    from qdo.connections.opened import Connections
    from qdo.ops.status import Statuses

SHARED = ("app", "broker", "coordinator", "namespace", "connect_seconds")

WATCH = "2s"
# Switches to the terminal's second screen and hides the cursor.
_BEGIN = "\x1b[?1049h\x1b[?25l"
_END = "\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_REST_OF_LINE = "\x1b[K"
_REST_OF_SCREEN = "\x1b[J"

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options with which a command reads and judges queues."""

    budget: int | None
    pause_seconds: float
    rules: VerdictRules


def verdict_options(function: Any) -> Any:
    """Add the options of a command that judges queues, as `rules`."""

    def call(late: float, stuck: float, **arguments: Any) -> Any:
        return function(rules=VerdictRules(late, stuck), **arguments)

    update_wrapper(call, function)
    duration_option(
        "--stuck", f"{RULES.stuck_seconds:g}s", "A queue is stuck if one message runs for so long."
    )(call)
    duration_option(
        "--late", f"{RULES.late_seconds:g}s", "A queue lags if its next message is this old."
    )(call)
    return call


def reading_options(function: Any) -> Any:
    """Add the options of a command that reads and judges queues, as `reading`."""

    def call(budget: int | None, window: float, rules: VerdictRules, **arguments: Any) -> Any:
        return function(reading=ReadOptions(budget, window, rules), **arguments)

    update_wrapper(call, function)
    click.option(
        "--budget",
        metavar="N",
        type=click.IntRange(min=0),
        help="Request at most N backlogs from brokers that need a request for each, SQS and Kinesis"
        " (default 100): first of failing queues, then of those without an owner, then of those"
        " that are behind for longest.",
    )(call)
    duration_option(
        "--window",
        "0s",
        "Read twice, this far apart: only then a queue can be catching-up or rewound.",
    )(call)
    return verdict_options(call)


def read_statuses(connections: Connections, glob: str, budget: int | None = None) -> Statuses:
    from qdo.ops.status import queue_statuses  # imports all brokers, which --help does not need

    return queue_statuses(
        connections.client,
        connections.layout,
        connections.broker,
        glob,
        budget,
        connections.broker_fault,
    )


def read_queues(connections: Connections, glob: str, reading: ReadOptions) -> list[Statuses]:
    """Read the queues once. With --window, read them again after this pause."""
    readings = [read_statuses(connections, glob, reading.budget)]
    if reading.pause_seconds:
        time.sleep(reading.pause_seconds)
        readings.append(read_statuses(connections, glob, reading.budget))
    return readings


def report_unasked(statuses: Statuses) -> None:
    """Report on stderr the number of backlogs that the command did not request."""
    if statuses.unasked:
        print_message(
            f"{statuses.unasked} of {pluralize(len(statuses.queues), 'backlog')} were not"
            " requested, because each needs a request; failing queues, queues without a worker"
            " and those longest without progress come first; --budget N requests more"
        )
    for what, reason in statuses.unread.items():
        print_message(f"cannot read {what}: {reason}")


def owner_text(item: Mapping[str, Any]) -> str | None:
    owner: str | None = item["owner"]
    if owner is not None:
        return f"{owner} (gone)" if item["owner_gone"] else owner
    if item["waits_for"]:
        return f"waits for {', '.join(item['waits_for'])}"
    reason: str | None = item["untaken"] or item["unclaimed"]
    return reason


def watch_option(function: _Function) -> _Function:
    """Add -w DURATION, which repeats the command until the user types q."""

    def run(*args: Any, watch: float | None, **options: Any) -> Any:
        return watched(lambda: function(*args, **options), watch)

    return watch_parameter(update_wrapper(run, function))  # type: ignore[return-value]


def watch_parameter(function: _Function) -> _Function:
    """Add -w DURATION, whose value in seconds is the argument `watch`."""
    return click.option(
        "-w",
        "--watch",
        type=PERIOD,
        is_flag=False,
        flag_value=WATCH,
        help=f"Show it again after each DURATION, by default {WATCH}; q ends it.",
    )(function)


def watched(show: Callable[[], Any], seconds: float | None) -> Any:
    """Call a function that writes output, repeatedly if `seconds` is not None."""
    if seconds is None:
        return show()
    if sys.stdout.isatty():
        watch_screen(show, seconds)
    while True:
        show()
        time.sleep(seconds)


def watch_screen(show: Callable[[], None], seconds: float) -> None:
    """Show the output that a function writes to stdout and stderr, until the user types q."""
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
    """Captures the output of a command as if the output were a terminal."""

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
    """Use the terminal's second screen. If stdin is a terminal, read keys without Enter."""
    with contextlib.ExitStack() as stack:
        if sys.stdin.isatty():
            import termios
            import tty

            before = termios.tcgetattr(sys.stdin)
            stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)
            tty.setcbreak(sys.stdin)
        stack.callback(lambda: (sys.stdout.write(_END), sys.stdout.flush()))
        # By default, SIGTERM ends the process without these callbacks, which would leave the second
        # screen open.
        signal.signal(signal.SIGTERM, _terminate)
        sys.stdout.write(_BEGIN)
        yield


def _terminate(number: int, frame: object) -> None:
    raise click.exceptions.Exit(128 + number)


def _quits(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (seconds_left := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(seconds_left)
            return False
        if select.select([sys.stdin], [], [], seconds_left)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b""):
                return True
    return False
