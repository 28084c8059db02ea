"""`qdo cancel`: cancel messages before they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

import click

from qdo.cli.changing import Consent, changing
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, parse_duration
from qdo.coordination.znodes.queue_node import CancelOutcome
from qdo.errors import NotFoundError, PartialFailureError, UsageError
from qdo.fleet.action_machine import AHEAD_SECONDS
from qdo.ops.cancel import DELAYED, NOT_FOUND, SUCCESSES, WAITING, Cancellation, cancel
from qdo.settings.settings import Settings
from qdo.text import join_some, pluralize

_COLUMNS = ("queue", "id", "position", "outcome")


@click.command("cancel")
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--timeout",
    metavar="DURATION",
    default="5s",
    show_default=True,
    help="How long the owner of the queue may take to answer.",
)
@changing
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def cancel_messages(
    queue: str,
    ids: tuple[str, ...],
    timeout: str,
    consent: Consent,
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
        broker = connections.known_broker()
        if broker is None:
            raise NotFoundError(what="queue", name=queue)
        place = connections.client, connections.layout, broker, queue, ids
        planned: list[Cancellation] = []

        def show(form: str, out: TextIO) -> None:
            planned[:] = cancel(*place, really=False)
            _show(queue, planned, form, out)
            if all(each.outcome == NOT_FOUND for each in planned):
                _raise_for(queue, planned)  # there is nothing to confirm

        if consent.given(f"cancel {pluralize(len(ids), 'message')}", show, form):
            done = cancel(*place, timeout_seconds=seconds, reason=consent.reason)
            _show(queue, done, form)
            _raise_for(queue, done)
        else:
            _raise_for(queue, planned)


def _show(
    queue: str, results: Sequence[Cancellation], form: str, out: TextIO | None = None
) -> None:
    columns = [*_COLUMNS, *(("reason",) if any(each.reason for each in results) else ())]
    items = [_item(queue, each) for each in results]
    emit("qdo.cancel/1", items, form, {each: each.upper() for each in columns}, out)


def _item(queue: str, result: Cancellation) -> dict[str, Any]:
    return {
        "queue": queue,
        "id": result.id or result.name,
        "position": None if result.position is None else str(result.position),
        "outcome": result.outcome,
        "executed": result.outcome == CancelOutcome.CANCELLED.value,
        "reason": result.reason or None,
    }


def _raise_for(queue: str, results: Sequence[Cancellation]) -> None:
    """Raise an error if a message is not cancelled, or would not be."""
    failed = [each for each in results if each.outcome not in (*SUCCESSES, WAITING, DELAYED)]
    if failed and all(each.outcome == NOT_FOUND for each in results):
        names = join_some([each.name for each in failed])
        raise NotFoundError(what=f"message in queue {queue!r}", name=names)
    if failed:
        raise PartialFailureError(
            done=len(results) - len(failed),
            total=len(results),
            what="messages can be cancelled",
            rest=join_some([f"{each.name} ({each.outcome})" for each in failed]),
        )
