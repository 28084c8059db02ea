"""`qdo seek`: process messages again, or skip them."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, reason_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.errors import NotFoundError
from qdo.ops.seek import EARLIEST, QueuePosition, SeekPlan, check_seekable, execute, plan_seek
from qdo.positions import format_last
from qdo.settings.settings import Settings
from qdo.text import short_duration


@click.command()
@click.argument("queue")
@click.argument("target", metavar="earliest|latest|POSITION|TIME")
@click.option("--execute", "really", is_flag=True, help="Do it; without, only show the effect.")
@reason_option
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def seek(queue: str, target: str, really: bool, reason: str, form: str, settings: Settings) -> None:
    """Move a queue to another position.

    Moving backwards processes messages again; moving forwards skips messages. Nothing changes
    without --execute. Workers may be running: the owner finishes its message in flight and
    resumes after the new position. This also repairs a queue that is stuck because its node is
    corrupt.
    """
    require_app(settings)
    with open_connections(settings) as connections:
        client, broker = connections.client, connections.broker
        if broker is not None:
            check_seekable(broker)
        if client is None or broker is None:
            raise NotFoundError(what="queue", name=queue)
        plan = plan_seek(client, connections.layout, broker, queue, target)
        if really:
            execute(client, connections.layout, plan, reason)
    item = _item(plan, really)
    columns = ["queue", "before", "after", *_measures(plan), "executed"]
    if form == "table":
        for name in ("before", "after"):
            item[name] = item[f"{name}_position"] or item[name]
            behind = item[f"behind_{name}"]
            item[f"behind_{name}"] = None if behind is None else short_duration(behind)
    emit("qdo.seek/1", [item], form, {name: name.replace("_", " ").upper() for name in columns})
    if not really:
        print_message("nothing was changed; add --execute to move the queue")


def _item(plan: SeekPlan, really: bool) -> dict[str, Any]:
    return {
        "queue": plan.queue,
        "before": None if plan.before is None else _shown(plan.before),
        "after": _shown(plan.after),
        "before_position": None if plan.before is None else plan.before.position,
        "after_position": plan.after.position,
        "waiting_before": plan.waiting_before,
        "waiting_after": plan.waiting_after,
        "behind_before": plan.behind_before,
        "behind_after": plan.behind_after,
        "executed": really,
    }


def _measures(plan: SeekPlan) -> tuple[str, ...]:
    """Return the columns that show how much is processed again, or skipped."""
    if plan.waiting_after is None:
        return ("behind_before", "behind_after")
    return ("waiting_before", "waiting_after")


def _shown(place: QueuePosition) -> str:
    return format_last(place.last) or EARLIEST
