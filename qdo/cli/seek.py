"""`qdo seek`: process again, or pass over."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.output import emit, say
from qdo.cli.reach import reached
from qdo.cli.shell import output_option, require_app, with_settings
from qdo.cli.times import short_duration
from qdo.errors import NotFoundError
from qdo.message import format_last
from qdo.ops.seek import EARLIEST, Place, Seek, check_seekable, execute, plan_seek
from qdo.settings import Settings


@click.command()
@click.argument("queue")
@click.argument("target", metavar="earliest|latest|POSITION|TIME")
@click.option("--execute", "really", is_flag=True, help="Do it; without, only say what it does.")
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds")
@output_option
def seek(queue: str, target: str, really: bool, form: str, settings: Settings) -> None:
    """Let a queue go on after another position.

    Backwards its messages are processed again, forwards they are passed over. Nothing changes
    without --execute. Workers may run: the owner finishes the message in hand and goes on from
    there. A queue that stands still because its node is spoilt is repaired by this.
    """
    require_app(settings)
    with reached(settings) as reach:
        if reach.broker is not None:
            check_seekable(reach.broker)
        if reach.client is None or reach.broker is None:
            raise NotFoundError(what="queue", name=queue)
        plan = plan_seek(reach.client, reach.layout, reach.broker, queue, target)
        if really:
            execute(reach.client, reach.layout, plan)
    item = _item(plan, really)
    columns = ["queue", "before", "after", *_measures(plan), "executed"]
    if form == "table":
        for name in ("before", "after"):
            item[name] = item[f"{name}_position"] or item[name]
            behind = item[f"behind_{name}"]
            item[f"behind_{name}"] = None if behind is None else short_duration(behind)
    emit("qdo.seek/1", [item], form, {name: name.replace("_", " ").upper() for name in columns})
    if not really:
        say("nothing was changed: add --execute to do it")


def _item(plan: Seek, really: bool) -> dict[str, Any]:
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


def _measures(plan: Seek) -> tuple[str, ...]:
    """Return what tells best how much is processed again, or passed over."""
    if plan.waiting_after is None:
        return ("behind_before", "behind_after")
    return ("waiting_before", "waiting_after")


def _shown(place: Place) -> str:
    return format_last(place.last) or EARLIEST
