"""`qdo purge`: drop all messages that wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

import click

from qdo.cli.changing import Consent, changing
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit
from qdo.errors import NotFoundError
from qdo.ops.seek import PurgePlan, check_purging, plan_purge, purge, queues_to_purge
from qdo.positions import format_last
from qdo.settings.settings import Settings
from qdo.text import pluralize

_COLUMNS = ("queue", "waiting", "delayed", "executed")


@click.command("purge")
@click.argument("glob", metavar="QUEUE|GLOB")
@click.option("--delayed", is_flag=True, help="Also drop the delayed messages.")
@changing
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def purge_queues(glob: str, delayed: bool, consent: Consent, form: str, settings: Settings) -> None:
    """Drop all messages that wait in queues, without running them.

    Messages that arrive later are not dropped. Workers may be running: the owner finishes its
    message in flight. Without --delayed, delayed messages run when they are due.
    """
    require_app(settings)
    with open_connections(settings) as connections:
        client, layout, broker = connections.client, connections.layout, connections.known_broker()
        if broker is not None:
            check_purging(broker)
        if client is None or broker is None:
            raise NotFoundError(what="queue", name=glob)
        queues = queues_to_purge(client, layout, glob)
        if not queues:
            raise NotFoundError(what="queue that matches", name=glob)
        plans = [plan_purge(client, layout, broker, each, delayed=delayed) for each in queues]
        items = [_item(plan) for plan in plans]
        what = f"purge {pluralize(len(plans), 'queue')}"
        if consent.given(what, partial(_show, items), form):
            try:
                for index, plan in enumerate(plans):
                    dropped = purge(client, layout, broker, plan, consent.reason)
                    items[index] = _item(plan, executed=True, dropped=dropped)
            finally:  # what was done is shown even if the rest could not be
                _show(items, form)


def _show(items: Sequence[dict[str, Any]], form: str, out: TextIO | None = None) -> None:
    emit("qdo.purge/1", items, form, {each: each.upper() for each in _COLUMNS}, out)


def _item(plan: PurgePlan, executed: bool = False, dropped: int | None = None) -> dict[str, Any]:
    planned = None if plan.delayed is None else len(plan.delayed)
    return {
        "queue": plan.queue,
        "waiting": plan.waiting,
        "delayed": planned if dropped is None or planned is None else dropped,
        "upto": format_last(plan.seek.after.last),
        "executed": executed,
    }
