"""`qdo cancel`: cancel messages before they run."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.durations import parse_duration
from qdo.cli.framework import output_option, reason_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.errors import NotFoundError, PartialFailureError, UsageError
from qdo.fleet.action_node import AHEAD_SECONDS
from qdo.ops.messages.cancel import NOT_FOUND, SUCCESSES, Cancellation, cancel
from qdo.settings.settings import Settings
from qdo.text import join_some

_COLUMNS = ("queue", "id", "position", "outcome")


@click.command("cancel")
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("--dry-run", is_flag=True, help="Only show which messages wait.")
@click.option(
    "--timeout",
    metavar="DURATION",
    default="5s",
    show_default=True,
    help="How long the owner of the queue may take to answer.",
)
@reason_option
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def cancel_messages(
    queue: str,
    ids: tuple[str, ...],
    dry_run: bool,
    timeout: str,
    reason: str,
    form: str,
    settings: Settings,
) -> None:
    """Cancel messages that wait or are delayed, so that they never run.

    ID is the id of a message or its position; `qdo peek` shows both. A message whose first attempt
    has begun is not cancelled, and the command says so. Workers may be running.
    """
    require_app(settings)
    seconds = parse_duration(timeout, "--timeout")
    if not 0 < seconds <= AHEAD_SECONDS:
        raise UsageError(reason=f"--timeout must be at most 1h and not 0, got {timeout!r}")
    with open_connections(settings) as connections:
        broker = connections.broker
        if broker is None:
            raise NotFoundError(what="queue", name=queue)
        results = cancel(
            connections.client,
            connections.layout,
            broker,
            queue,
            ids,
            timeout_seconds=seconds,
            reason=reason,
            really=not dry_run,
        )
    columns = [*_COLUMNS, *(("reason",) if any(each.reason for each in results) else ())]
    items = [_item(queue, each) for each in results]
    emit("qdo.cancel/1", items, form, {each: each.upper() for each in columns})
    if dry_run:
        print_message("nothing was changed; leave out --dry-run to cancel what waits")
        return
    _raise_for(queue, results)


def _item(queue: str, result: Cancellation) -> dict[str, Any]:
    return {
        "queue": queue,
        "id": result.id or result.name,
        "position": None if result.position is None else str(result.position),
        "outcome": result.outcome,
        "reason": result.reason or None,
    }


def _raise_for(queue: str, results: list[Cancellation]) -> None:
    """Raise an error if a message is not cancelled."""
    failed = [each for each in results if each.outcome not in SUCCESSES]
    if failed and all(each.outcome == NOT_FOUND for each in results):
        names = join_some([each.name for each in failed])
        raise NotFoundError(what=f"message in queue {queue!r}", name=names)
    if failed:
        raise PartialFailureError(
            done=len(results) - len(failed),
            total=len(results),
            what="messages are cancelled",
            rest=join_some([f"{each.name} ({each.outcome})" for each in failed]),
        )
