"""`qdo purge`: drop all messages that wait."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, reason_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.errors import ConfirmationRequiredError, NotFoundError
from qdo.ops.messages.purge import (
    PurgePlan,
    check_purging,
    plan_purge,
    purge,
    queues_to_purge,
)
from qdo.positions import format_last
from qdo.settings.settings import Settings
from qdo.text import pluralize

_COLUMNS = ("queue", "waiting", "delayed", "purged")


@click.command("purge")
@click.argument("glob", metavar="QUEUE|GLOB")
@click.option("--delayed", is_flag=True, help="Also drop the delayed messages.")
@click.option("--dry-run", is_flag=True, help="Only show how many messages there are.")
@click.option("--yes", is_flag=True, help="Confirm it for a GLOB; one QUEUE needs none.")
@reason_option
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def purge_queues(
    glob: str,
    delayed: bool,
    dry_run: bool,
    yes: bool,
    reason: str,
    form: str,
    settings: Settings,
) -> None:
    """Drop all messages that wait in queues, without running them.

    Messages that arrive later are not dropped. Workers may be running: the owner finishes its
    message in flight. Without --delayed, delayed messages run when they are due.
    """
    require_app(settings)
    with open_connections(settings) as connections:
        client, layout, broker = connections.client, connections.layout, connections.broker
        if broker is not None:
            check_purging(broker)
        if client is None or broker is None:
            raise NotFoundError(what="queue", name=glob)
        queues = queues_to_purge(client, layout, glob)
        if not queues:
            raise NotFoundError(what="queue that matches", name=glob)
        plans = [plan_purge(client, layout, broker, each, delayed=delayed) for each in queues]
        confirmed = yes or queues == [glob]
        items = []
        try:
            for plan in plans:
                really = confirmed and not dry_run
                items.append(_item(plan, really))
                if really:
                    dropped = purge(client, layout, broker, plan, reason)
                    items[-1] = _item(plan, purged=True, dropped=dropped)
        finally:
            emit("qdo.purge/1", items, form, {each: each.upper() for each in _COLUMNS})
    if dry_run:
        print_message("nothing was changed; leave out --dry-run to drop these messages")
    elif not confirmed:
        raise ConfirmationRequiredError(what=f"purging {pluralize(len(plans), 'queue')}")


def _item(plan: PurgePlan, purged: bool, dropped: int | None = None) -> dict[str, Any]:
    planned = None if plan.delayed is None else len(plan.delayed)
    return {
        "queue": plan.queue,
        "waiting": plan.waiting,
        "delayed": planned if dropped is None or planned is None else dropped,
        "upto": format_last(plan.seek.after.last),
        "purged": purged,
    }
