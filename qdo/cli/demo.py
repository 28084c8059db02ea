"""The command `qdo demo`: watch queues being shared out, and one worker being killed."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from types import FrameType

import click

from qdo.demo.play import Cast, Play
from qdo.demo.show import Show
from qdo.demo.stage import Stage
from qdo.errors import UsageError


@click.command()
@click.option(
    "--queues", type=click.IntRange(1, 10_000), default=300, show_default=True, help="How many."
)
@click.option(
    "--messages",
    type=click.IntRange(1, 10_000_000),
    default=60_000,
    show_default=True,
    help="How many in all.",
)
@click.option("--keep", is_flag=True, help="Keep the folder with databases, ledger and log.")
def demo(queues: int, messages: int, keep: bool) -> int:
    """Watch queues being shared out among three workers, one of which is killed.

    Needs no server and takes less than a minute. At the end every message is accounted for;
    the exit code is 0 only if nothing was lost, out of order or handled by two workers at once.
    """
    if messages < queues:
        raise UsageError(reason="every queue needs a message: --messages is less than --queues")
    folder = Path(tempfile.mkdtemp(prefix="qdo-demo-"))
    show = Show()
    cast = Cast(queues=queues, messages=messages)
    show.title(
        f"qdo demo: {queues} queues, {messages:,} messages, {cast.processes} worker processes "
        "on this machine"
    )
    good = False
    try:
        good = _perform(folder, show, cast)
    except KeyboardInterrupt:
        good = True  # nothing to look into
        raise
    finally:
        if keep or not good:
            show.tell(f"databases, ledger and log are kept in {folder}")
        else:
            shutil.rmtree(folder)
    return 0 if good else 1


def _perform(folder: Path, show: Show, cast: Cast) -> bool:
    with Stage(folder) as stage:
        play = Play(stage, show, cast)

        def stop(number: int, frame: FrameType | None) -> None:
            play.stopped = True

        old = signal.signal(signal.SIGTERM, stop)
        try:
            return play.perform()
        finally:
            signal.signal(signal.SIGTERM, old)
