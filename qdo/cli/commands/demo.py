"""The command `qdo demo`, in which workers share queues and the demo kills one worker."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from types import FrameType

import click

from qdo.demo.display import Display
from qdo.demo.sandbox import Sandbox
from qdo.demo.scenario import Scenario, Size
from qdo.errors import UsageError


@click.command()
@click.option(
    "--queues",
    type=click.IntRange(1, 10_000),
    default=300,
    show_default=True,
    help="Number of queues.",
)
@click.option(
    "--messages",
    type=click.IntRange(1, 10_000_000),
    default=60_000,
    show_default=True,
    help="Number of messages in total.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the folder with databases, ledger and log; always if a check fails.",
)
def demo(queues: int, messages: int, keep: bool) -> int:
    """Watch three workers share many queues, while one of them is killed.

    Needs no server and takes less than a minute. At the end every message is accounted for. The
    exit code is 0 only if no message was lost, out of order or processed by two workers at once.
    """
    if messages < queues:
        raise UsageError(
            reason=f"--messages must be at least --queues, {queues}, got {messages}: every queue "
            "needs a message"
        )
    folder = Path(tempfile.mkdtemp(prefix="qdo-demo-"))
    display = Display()
    size = Size(queues=queues, messages=messages)
    display.title(
        f"qdo demo: {queues} queues, {messages:,} messages, {size.processes} worker processes "
        "on this machine"
    )
    good = False
    try:
        good = _perform(folder, display, size)
    except KeyboardInterrupt:
        good = True  # an interruption is not a failure of the demo
        raise
    finally:
        if keep or not good:
            display.result(f"databases, ledger and log are kept in {folder}")
        else:
            shutil.rmtree(folder)
    return 0 if good else 1


def _perform(folder: Path, display: Display, size: Size) -> bool:
    with Sandbox(folder) as sandbox:
        scenario = Scenario(sandbox, display, size)

        def stop(number: int, frame: FrameType | None) -> None:
            scenario.stopped = True

        old = signal.signal(signal.SIGTERM, stop)
        try:
            return scenario.perform()
        finally:
            signal.signal(signal.SIGTERM, old)
