"""`qdo unblock`: decide on the message that blocks a queue."""

from __future__ import annotations

import click

from qdo.brokers import keeps_dead_letters, positions_of
from qdo.cli.output import emit
from qdo.cli.reach import reached
from qdo.cli.shell import output_option, require_app, with_settings
from qdo.coordination.layout import MAX_LAST
from qdo.coordination.operator import Which
from qdo.errors import NotFoundError, UnsupportedError, UsageError
from qdo.message import format_position
from qdo.ops.unblock import Verdict, unblock
from qdo.settings import Settings


@click.command("unblock")
@click.argument("queue")
@click.option("--retry", is_flag=True, help="Run the message again, with attempts from 1.")
@click.option("--skip", is_flag=True, help="Pass the message over.")
@click.option("--dead-letter", is_flag=True, help="Set the message aside with its error.")
@click.option(
    "--position",
    metavar="P",
    type=click.IntRange(min=1),
    help="Decide on the message there, as `qdo queues -o json` shows it; else on the first one.",
)
@click.option("--all", "everything", is_flag=True, help="Decide on every message that blocks.")
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def unblock_queue(
    queue: str,
    retry: bool,
    skip: bool,
    dead_letter: bool,
    position: int | None,
    everything: bool,
    form: str,
    settings: Settings,
) -> None:
    """Let a blocked queue go on, after a decision on the message that blocks it.

    Workers may run: the owner goes on at once. `qdo queues` shows which queues are blocked, and
    by what error.
    """
    require_app(settings)
    verdict = _verdict(retry, skip, dead_letter)
    which = _which(position, everything)
    if verdict == "dead-letter" and not keeps_dead_letters(settings.broker):
        # Its owner could not carry it out, and a decision cannot be taken back.
        raise UnsupportedError(
            broker="Kinesis",
            what="keep dead letters",
            remedy="add dead_letters=s3://BUCKET/PREFIX to the broker's address, for workers, too, "
            "or decide on --retry or --skip",
        )
    with reached(settings, broker=False) as reach:
        if reach.client is None:
            raise NotFoundError(what="queue", name=queue)
        decided = unblock(reach.client, reach.layout, queue, verdict, which)
    items = [
        {
            "queue": queue,
            "position": str(marks.position),
            "time": _sent(marks.position, settings.broker),
            "attempts": marks.attempts,
            "error": marks.error,
            "verdict": verdict,
        }
        for marks in decided
    ]
    columns = ("queue", "time", "attempts", "verdict", "error")
    headings = {name: name.upper() for name in columns}
    emit("qdo.unblock/1", items, form, {**headings, "time": "SENT"})


def _sent(position: int, broker: str) -> str | None:
    """Return when the message was sent; None where the address is not that of its broker."""
    last = positions_of(broker).last(position)
    return format_position(last) if last <= MAX_LAST else None


def _verdict(retry: bool, skip: bool, dead_letter: bool) -> Verdict:
    options: tuple[tuple[Verdict, bool], ...] = (
        ("retry", retry),
        ("skip", skip),
        ("dead-letter", dead_letter),
    )
    asked = [name for name, given in options if given]
    if len(asked) != 1:
        raise UsageError(
            reason="say what becomes of the message: one of --retry, --skip, --dead-letter"
        )
    return asked[0]


def _which(position: int | None, everything: bool) -> Which:
    if everything and position is not None:
        raise UsageError(reason="give one of --position and --all")
    if everything:
        return "all"
    return "first" if position is None else position
