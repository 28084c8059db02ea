"""`qdo delete`: delete queues."""

from __future__ import annotations

import dataclasses

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, reason_option, require_app, with_settings
from qdo.cli.output import emit
from qdo.errors import ConfirmationRequiredError, NotFoundError
from qdo.ops.delete import delete, plan_deletion
from qdo.settings.settings import Settings
from qdo.text import pluralize


@click.command("delete")
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@click.option(
    "--with-messages",
    is_flag=True,
    help="Also delete messages that are not done, and dead letters.",
)
@click.option("--yes", is_flag=True, help="Do it; without, only show what would be deleted.")
@reason_option
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def delete_queues(
    queues: tuple[str, ...],
    with_messages: bool,
    yes: bool,
    reason: str,
    form: str,
    settings: Settings,
) -> None:
    """Delete queues, with their done messages and their progress.

    A queue with messages that are not done, or with dead letters, is only deleted with
    --with-messages. Workers may be running: the owner finishes its running job first. A message
    that is sent later creates the queue again. If the command is interrupted, repeat it.
    """
    require_app(settings)
    with open_connections(settings) as connections:
        client, layout, broker = connections.client, connections.layout, connections.broker
        if broker is None:
            raise NotFoundError(what="queue", name=queues[0])
        plans = [plan_deletion(client, layout, broker, queue) for queue in dict.fromkeys(queues)]
        if not with_messages:
            for plan in plans:
                plan.check_empty()
        if yes:
            for plan in plans:
                delete(client, layout, broker, plan, with_messages=with_messages, reason=reason)
    items = [{**dataclasses.asdict(plan), "deleted": yes} for plan in plans]
    columns = ("queue", "owner", "waiting", "delayed", "dead_letters", "deleted")
    emit("qdo.delete/1", items, form, {name: name.replace("_", " ").upper() for name in columns})
    if not yes:
        raise ConfirmationRequiredError(what=f"the deletion of {pluralize(len(plans), 'queue')}")
