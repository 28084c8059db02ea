"""`qdo delete`: delete queues."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TextIO

import click

from qdo.cli.changing import Consent, changing
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit
from qdo.errors import NotFoundError
from qdo.ops.delete import Deletion, delete, plan_deletion
from qdo.settings.settings import Settings
from qdo.text import pluralize


@click.command("delete")
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@click.option(
    "--with-messages",
    is_flag=True,
    help="Also delete messages that are not done, and dead letters.",
)
@changing
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def delete_queues(
    queues: tuple[str, ...],
    with_messages: bool,
    consent: Consent,
    form: str,
    settings: Settings,
) -> None:
    """Delete queues, with their done messages and their progress.

    A queue with messages that are not done, or with dead letters, is only deleted with
    --with-messages. Workers may be running: the owner finishes its running job first. A message
    that is sent meanwhile is never deleted: it keeps the queue, and the command ends with an error.
    One that is sent later creates the queue again. If the command is interrupted, repeat it.
    """
    require_app(settings)
    with open_connections(settings) as connections:
        client, layout, broker = connections.client, connections.layout, connections.known_broker()
        if broker is None:
            raise NotFoundError(what="queue", name=queues[0])
        plan = partial(plan_deletion, client, layout, broker, with_messages=with_messages)
        plans = [plan(queue) for queue in dict.fromkeys(queues)]
        what = f"delete {pluralize(len(plans), 'queue')}"
        if consent.given(what, partial(_show, plans, 0), form):
            done = 0
            try:
                for each in plans:
                    delete(client, layout, broker, each, reason=consent.reason)
                    done += 1
            finally:  # what was done is shown even if the rest could not be
                _show(plans, done, form)


def _show(plans: Sequence[Deletion], done: int, form: str, out: TextIO | None = None) -> None:
    """Show deletions, of which the first `done` are executed."""
    columns = ("queue", "owner", "waiting", "delayed", "dead_letters", "executed")
    items = [
        {name: getattr(plan, name) for name in (*columns[:-1], "stored")}
        | {"executed": index < done}
        for index, plan in enumerate(plans)
    ]
    headings = {name: name.replace("_", " ").upper() for name in columns}
    emit("qdo.delete/1", items, form, headings, out)
