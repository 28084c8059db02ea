"""`qdo move`: which worker has which queue."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TextIO

import click

from qdo.cli.changing import Consent, changing
from qdo.cli.connections import open_coordinator
from qdo.cli.options import COORDINATOR, output_option, with_settings
from qdo.cli.output import emit, parse_duration, print_message
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NotFoundError, UsageError
from qdo.ops.placement import (
    QueueMove,
    execute_move,
    plan_move,
    planned_changes,
    read_plan_input,
    wait_for_owner,
)
from qdo.settings.settings import Settings
from qdo.text import pluralize


@click.command()
@click.argument("queue", required=False)
@click.argument("worker", required=False)
@click.option(
    "--plan", is_flag=True, help="List what the leader would assign to other workers now, and why."
)
@click.option(
    "--timeout",
    metavar="DURATION",
    default="30s",
    show_default=True,
    help="How long to wait until the worker owns the queue; 0s: do not wait.",
)
@changing
@with_settings(*COORDINATOR)
@output_option
def move(
    queue: str | None,
    worker: str | None,
    plan: bool,
    timeout: str,
    consent: Consent,
    form: str,
    settings: Settings,
) -> None:
    """Hand QUEUE to WORKER, without a pause of any other queue.

    The present owner finishes its message and releases the queue, then the worker claims it. The
    queue stays with the worker until that worker stops, drains, or does not take it any more; a
    restarted worker has another name. For balance, another queue of the worker may go to another
    worker. `qdo workers` lists the workers.

    After --timeout the exit code is 1, and the queue still changes hands later. A worker that
    drains or does not take the queue is rejected (5), a missing one not found (6). At most 1,000
    queues of an app can be moved. A leader of an older version ignores the move: exit code 1.

    With --plan, nothing moves. Normally the list is empty, because the leader assigns queues at
    once when workers or queues change, and once a minute. If it has the same queues twice, a minute
    apart, the leader does not work: see its log. A worker that claims nothing for ten seconds gets
    nothing for five minutes, which is not shown.
    """
    if plan is not (queue is None) or plan is not (worker is None):
        raise UsageError(reason="give QUEUE and WORKER, or only --plan")
    seconds = parse_duration(timeout, "--timeout")
    with open_coordinator(settings) as (client, layout):
        if queue is None or worker is None:
            _list_changes(client, layout, form)
            return
        if client is None:
            raise NotFoundError(what="queue", name=queue)
        found = plan_move(client, layout, queue, worker)
        what = f"move queue {queue!r} to {worker}"
        if consent.given(what, partial(_show, found, False), form, asks=False):
            execute_move(client, layout, found, consent.reason)
            if seconds:
                wait_for_owner(client, layout, found, seconds)
            _show(found, True, form)


def _show(move: QueueMove, executed: bool, form: str, out: TextIO | None = None) -> None:
    names = {"queue": move.queue, "owner": move.owner, "worker": move.worker}
    columns = {"queue": "QUEUE", "owner": "OLD OWNER", "worker": "NEW OWNER"}
    emit("qdo.move/1", [{**names, "executed": executed}], form, columns, out)


def _list_changes(client: Client | None, layout: Layout, form: str) -> None:
    changes = planned_changes(read_plan_input(client, layout)) if client is not None else []
    columns = {"queue": "QUEUE", "before": "ASSIGNED TO", "after": "NEXT", "why": "WHY"}
    emit("qdo.rebalance/1", [dataclasses.asdict(each) for each in changes], form, columns)
    if form != "table":
        return
    if not changes:
        print_message("every queue is assigned as the leader would assign it now")
    else:
        print_message(f"{pluralize(len(changes), 'queue')} would be assigned differently")
