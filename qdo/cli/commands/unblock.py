"""`qdo unblock`: decide about the message that blocks a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from qdo.brokers.registry import positions_of
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, reason_option, require_app, with_settings
from qdo.cli.output import emit
from qdo.coordination.queue_admin import Which
from qdo.coordination.znodes.progress import MAX_LAST, FailureRecord
from qdo.errors import NotBlockingError, NotFoundError, UsageError
from qdo.ops.unblock import Decision, check_store, failing, id_of, unblock
from qdo.positions import TIME_POSITIONS, format_position
from qdo.settings.settings import Settings


@click.command("unblock")
@click.argument("queue")
@click.option("--retry", is_flag=True, help="Run the message again now, with attempts from 1.")
@click.option("--skip", is_flag=True, help="Skip the message.")
@click.option("--dead-letter", is_flag=True, help="Store the message as a dead letter.")
@click.option(
    "--message",
    metavar="ID",
    help="Decide about this message, named by its id or position; required by --skip.",
)
@click.option("--all", "everything", is_flag=True, help="Decide about every blocking message.")
@reason_option
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def unblock_queue(
    queue: str,
    retry: bool,
    skip: bool,
    dead_letter: bool,
    message: str | None,
    everything: bool,
    reason: str,
    form: str,
    settings: Settings,
) -> None:
    """Resume a blocked queue with a decision about the message that blocks it.

    With --retry also a queue that is not blocked, but waits for the next attempt of a message.
    Workers may be running: the owner resumes at once. `qdo queues` shows the blocked queues and
    their errors.
    """
    require_app(settings)
    decision = _decision(retry, skip, dead_letter)
    if decision == "dead-letter":
        check_store(settings.broker)
    if everything and message is not None:
        raise UsageError(reason="give --message or --all, not both")
    positions = positions_of(settings.broker)
    with open_connections(settings, broker=positions is TIME_POSITIONS) as connections:
        client, layout = connections.client, connections.layout
        if client is None:
            raise NotFoundError(what="queue", name=queue)
        found = failing(client, layout, queue)
        named = [
            (each, id_of(connections.broker, positions, queue, each.position)) for each in found
        ]
        which: Which = "all" if everything else _which(queue, message, named)
        if decision == "skip" and which == "first":
            if found and found[0].blocked:
                raise _unnamed(queue, *named[0])
            which = 0  # no message: one that blocks the queue by now was not named either
        decided = unblock(client, layout, queue, decision, which, reason)
    ids = {each.position: id for each, id in named}
    items = [
        {
            "queue": queue,
            "id": ids.get(each.position),
            **_item(each, settings),
            "decision": decision,
        }
        for each in decided
    ]
    columns = ("queue", "id", "attempts", "decision", "error")
    emit("qdo.unblock/1", items, form, {name: name.upper() for name in columns})


def _item(failure: FailureRecord, settings: Settings) -> dict[str, Any]:
    return {
        "position": str(failure.position),
        "time": _sent(failure.position, settings.broker),
        "attempts": failure.attempts,
        "error": failure.error,
    }


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


def _which(
    queue: str, message: str | None, named: Sequence[tuple[FailureRecord, str | None]]
) -> Which:
    if message is None:
        return "first"
    for failure, id in named:
        if message.lower() in (id, str(failure.position)):
            return failure.position
    raise NotBlockingError(queue=queue, message=message)


def _unnamed(queue: str, failure: FailureRecord, id: str | None) -> UsageError:
    """Return the error of a --skip that, typed twice, would skip the message behind as well."""
    return UsageError(
        reason=f"--skip must name its message: give --message {id or failure.position}, which "
        f"blocks queue {queue!r} ({failure.error}), or --all"
    )
