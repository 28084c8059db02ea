"""The commands `qdo seek` and `qdo delete`, which move and delete queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from qdo.brokers.streams import has_heirs
from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import open_for_queue
from qdo.cli.output import duration_text, print_message
from qdo.cli.readings import SHARED
from qdo.ops.delete import Deletion, delete, plan_deletion
from qdo.ops.seek import EARLIEST, QueuePosition, SeekPlan, check_seekable, execute, plan_seek
from qdo.positions import format_last
from qdo.settings.settings import Settings
from qdo.text import pluralize


@click.command()
@click.argument("queue")
@click.argument("target", metavar="earliest|latest|POSITION|TIME")
@changing(*SHARED)
def seek(queue: str, target: str, consent: Consent, settings: Settings) -> None:
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
        effect = _seek_effect(plan)
        if consent.given(f"move queue {queue!r} to {target}", effect.show):
            execute(fleet.connected(queue), fleet.layout, plan, consent.reason)
            effect.show(consent.form, executed=True)
            broker = fleet.broker
            if broker.capabilities.streams and has_heirs(broker.streams.shards(), queue):
                text = "other shards have its keys now, so its messages may run beside newer ones"
                print_message(f"hint: {text}")


def _seek_effect(plan: SeekPlan) -> Effect:
    counted = plan.waiting_after is not None  # some brokers cannot count
    columns = ("queue", "before", "after", "waiting" if counted else "behind")
    return Effect("qdo.seek/1", columns, [_item(plan)], _seek_cells)


def _seek_cells(item: Mapping[str, Any]) -> dict[str, Any]:
    behind_before = duration_text(item["behind_before"])
    behind_after = duration_text(item["behind_after"])
    return {
        "before": item["before_position"] or item["before"],
        "after": item["after_position"] or item["after"],
        "waiting": f"{_known(item['waiting_before'])} -> {item['waiting_after']}",
        "behind": f"{_known(behind_before)} -> {_known(behind_after)}",
    }


def _item(plan: SeekPlan) -> dict[str, Any]:
    return {
        "queue": plan.queue,
        "before": None if plan.before is None else _time(plan.before),
        "after": _time(plan.after),
        "before_position": None if plan.before is None else plan.before.position,
        "after_position": plan.after.position,
        "waiting_before": plan.waiting_before,
        "waiting_after": plan.waiting_after,
        "behind_before": plan.behind_before,
        "behind_after": plan.behind_after,
    }


def _known(value: object) -> str:
    return "?" if value is None else str(value)


def _time(at: QueuePosition) -> str:
    return format_last(at.last) or EARLIEST


@click.command("delete")
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@click.option(
    "--with-messages",
    is_flag=True,
    help="Also delete messages that are not done, and dead letters.",
)
@changing(*SHARED)
def delete_queues(
    queues: tuple[str, ...],
    with_messages: bool,
    consent: Consent,
    settings: Settings,
) -> None:
    """Delete queues, with their done messages and their progress.

    A queue with messages that are not done, or with dead letters, is only deleted with
    --with-messages. Workers may be running: the owner finishes its running job first. A message
    that is sent meanwhile is never deleted: it keeps the queue, and the command ends with an error.
    One that is sent later creates the queue again. If the command is interrupted, repeat it: a
    queue that is only marked as deleted is not processed. qdo does not delete queues of SQS
    and shards of Kinesis: once they are gone at AWS, this command deletes their nodes.
    """
    with open_for_queue(settings, queues[0]) as fleet:
        names = dict.fromkeys(queues)
        plans = [plan_deletion(fleet, name, with_messages=with_messages) for name in names]
        columns = ("queue", "owner", "waiting", "delayed", "dead_letters", "executed")
        items = [_deletion_item(each) for each in plans]
        effect = Effect("qdo.delete/1", columns, items)
        if consent.given(f"delete {pluralize(len(plans), 'queue')}", effect.show):
            try:
                for deletion, item in zip(plans, items, strict=True):
                    delete(fleet, deletion, reason=consent.reason)
                    item["executed"] = True
            finally:  # show the deleted queues even if another queue failed
                effect.show(consent.form)


def _deletion_item(plan: Deletion) -> dict[str, Any]:
    names = ("queue", "owner", "waiting", "delayed", "dead_letters", "stored")
    return {**{name: getattr(plan, name) for name in names}, "executed": False}
