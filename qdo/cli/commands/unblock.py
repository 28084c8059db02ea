"""`qdo unblock`: decide about the message that blocks a queue."""

from __future__ import annotations

import click

from qdo.brokers.registry import keeps_dead_letters, positions_of
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit
from qdo.coordination.queue_admin import Which
from qdo.coordination.znodes.progress import MAX_LAST
from qdo.errors import NotFoundError, UnsupportedError, UsageError
from qdo.ops.unblock import Decision, unblock
from qdo.positions import format_position
from qdo.settings.settings import Settings


@click.command("unblock")
@click.argument("queue")
@click.option("--retry", is_flag=True, help="Run the message again, with attempts from 1.")
@click.option("--skip", is_flag=True, help="Skip the message.")
@click.option("--dead-letter", is_flag=True, help="Store the message as a dead letter.")
@click.option(
    "--position",
    metavar="P",
    type=click.IntRange(min=1),
    help="Decide about the message at P, as shown by `qdo queues -o json`; default: the first.",
)
@click.option("--all", "everything", is_flag=True, help="Decide about every blocking message.")
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
    """Resume a blocked queue with a decision about the message that blocks it.

    Workers may be running: the owner resumes at once. `qdo queues` shows the blocked queues and
    their errors.
    """
    require_app(settings)
    decision = _decision(retry, skip, dead_letter)
    which = _which(position, everything)
    if decision == "dead-letter" and not keeps_dead_letters(settings.broker):
        # The owner could not execute it, and a decision cannot be revoked.
        raise UnsupportedError(
            broker="Kinesis",
            what="store dead letters",
            remedy="add dead_letters=s3://BUCKET/PREFIX to the broker's address, also for workers, "
            "or use --retry or --skip",
        )
    with open_connections(settings, broker=False) as connections:
        if connections.client is None:
            raise NotFoundError(what="queue", name=queue)
        decided = unblock(connections.client, connections.layout, queue, decision, which)
    items = [
        {
            "queue": queue,
            "position": str(marks.position),
            "time": _sent(marks.position, settings.broker),
            "attempts": marks.attempts,
            "error": marks.error,
            "decision": decision,
        }
        for marks in decided
    ]
    columns = ("queue", "time", "attempts", "decision", "error")
    headings = {name: name.upper() for name in columns}
    emit("qdo.unblock/1", items, form, {**headings, "time": "SENT"})


def _sent(position: int, broker: str) -> str | None:
    """Return the time the message was sent; None if the address is not that of its broker."""
    last = positions_of(broker).to_time(position)
    return format_position(last) if last <= MAX_LAST else None


def _decision(retry: bool, skip: bool, dead_letter: bool) -> Decision:
    options: tuple[tuple[Decision, bool], ...] = (
        ("retry", retry),
        ("skip", skip),
        ("dead-letter", dead_letter),
    )
    chosen = [name for name, given in options if given]
    if len(chosen) != 1:
        raise UsageError(reason="give exactly one of --retry, --skip and --dead-letter")
    return chosen[0]


def _which(position: int | None, everything: bool) -> Which:
    if everything and position is not None:
        raise UsageError(reason="give --position or --all, not both")
    if everything:
        return "all"
    return "first" if position is None else position
