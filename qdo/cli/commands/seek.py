"""`qdo seek`: process messages again, or skip them. `qdo delete`: delete queues."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

import click

from qdo.brokers.streams import has_heirs
from qdo.cli.changing import Consent, changing
from qdo.cli.connections import open_for_queue
from qdo.cli.options import output_option, with_settings
from qdo.cli.output import emit, print_message
from qdo.cli.readings import SHARED
from qdo.ops.delete import Deletion, delete, plan_deletion
from qdo.ops.seek import EARLIEST, QueuePosition, SeekPlan, check_seekable, execute, plan_seek
from qdo.positions import format_last
from qdo.settings.settings import Settings
from qdo.text import pluralize, short_duration


@click.command()
@click.argument("queue")
@click.argument("target", metavar="earliest|latest|POSITION|TIME")
@changing
@with_settings(*SHARED)
@output_option
def seek(queue: str, target: str, consent: Consent, form: str, settings: Settings) -> None:
    """Move a queue to another position.

    Moving backwards processes messages again; moving forwards skips messages. Workers may be
    running: the owner finishes its message in flight and resumes after the new position. This also
    repairs a queue that is stuck because its node is corrupt. A finished shard starts again.

    \b
    earliest  the oldest message that the broker still has
    latest    the end: all messages that wait now are skipped
    POSITION  a number as in `last`; Kinesis: SEQUENCE, SEQUENCE:SUBSEQUENCE, or
              SHARD_END to finish a closed shard
    TIME      ISO 8601, UTC unless it has a time zone; not in the future

    WAITING is the number of messages after both positions; BEHIND, with brokers that cannot count,
    the age of the first one. A position that the shard never had is rejected. With SQS, which
    deletes done messages, the command is rejected.
    """
    with open_for_queue(settings, queue, check_seekable) as fleet:
        plan = plan_seek(fleet, queue, target)
        if consent.given(
            f"move queue {queue!r} to {target}", partial(_show_seeks, plan, False), form
        ):
            execute(fleet.connected(queue), fleet.layout, plan, consent.reason)
            _show_seeks(plan, True, form)
            if fleet.broker.capabilities.streams and has_heirs(
                fleet.broker.streams.shards(), queue
            ):
                text = "other shards have its keys now, so its messages may run beside newer ones"
                print_message(f"hint: {text}")


def _show_seeks(plan: SeekPlan, executed: bool, form: str, out: TextIO | None = None) -> None:
    item = _item(plan, executed)
    columns = ["queue", "before", "after"]
    if form == "table":
        for name in ("before", "after"):
            item[name] = item[f"{name}_position"] or item[name]
        counted = plan.waiting_after is not None  # not every broker can count
        columns.append("waiting" if counted else "behind")
        item["waiting"] = f"{_text(plan.waiting_before)} -> {plan.waiting_after}"
        item["behind"] = f"{_age(plan.behind_before)} -> {_age(plan.behind_after)}"
    emit("qdo.seek/1", [item], form, columns, out)


def _item(plan: SeekPlan, executed: bool) -> dict[str, Any]:
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
        "executed": executed,
    }


def _text(count: int | None) -> str:
    return "?" if count is None else str(count)


def _age(seconds: float | None) -> str:
    return "?" if seconds is None else short_duration(seconds)


def _shown(place: QueuePosition) -> str:
    return format_last(place.last) or EARLIEST


@click.command("delete")
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@click.option(
    "--with-messages",
    is_flag=True,
    help="Also delete messages that are not done, and dead letters.",
)
@changing
@with_settings(*SHARED)
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
    One that is sent later creates the queue again. If the command is interrupted, repeat it: a
    queue that is only marked as deleted is not processed. Queues of SQS and shards of Kinesis are
    deleted at AWS; this command then deletes their nodes.
    """
    with open_for_queue(settings, queues[0]) as fleet:
        names = dict.fromkeys(queues)
        plans = [plan_deletion(fleet, name, with_messages=with_messages) for name in names]
        what = f"delete {pluralize(len(plans), 'queue')}"
        if consent.given(what, partial(_show_deletions, plans, 0), form):
            done = 0
            try:
                for each in plans:
                    delete(fleet, each, reason=consent.reason)
                    done += 1
            finally:  # what was done is shown even if the rest could not be
                _show_deletions(plans, done, form)


def _show_deletions(
    plans: Sequence[Deletion], done: int, form: str, out: TextIO | None = None
) -> None:
    columns = ("queue", "owner", "waiting", "delayed", "dead_letters", "executed")
    items = [
        {name: getattr(plan, name) for name in (*columns[:-1], "stored")}
        | {"executed": index < done}
        for index, plan in enumerate(plans)
    ]
    emit("qdo.delete/1", items, form, columns, out)
