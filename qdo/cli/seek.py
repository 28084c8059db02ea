"""`qdo seek`: process again, or pass over."""

from __future__ import annotations

import click

from qdo.cli.output import emit, say
from qdo.cli.reach import reached
from qdo.cli.shell import output_option, require_app, with_settings
from qdo.errors import NotFoundError
from qdo.message import format_position
from qdo.ops.seek import execute, plan_seek
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
        if reach.client is None or reach.broker is None:
            raise NotFoundError(what="queue", name=queue)
        plan = plan_seek(reach.client, reach.layout, reach.broker, queue, target)
        if really:
            execute(reach.client, reach.layout, plan)
    item = {
        "queue": plan.queue,
        "before": _shown(plan.before),
        "after": _shown(plan.after),
        "waiting_before": plan.waiting_before,
        "waiting_after": plan.waiting_after,
        "executed": really,
    }
    emit("qdo.seek/1", [item], form, {name: name.replace("_", " ").upper() for name in item})
    if not really:
        say("nothing was changed: add --execute to do it")


def _shown(position: int | None) -> str | None:
    if position is None:
        return None
    return format_position(position) if position else "earliest"
