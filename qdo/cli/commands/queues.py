"""`qdo queues` and `qdo groups`: queues with owners, progress and backlogs, or added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import approximate, emit, print_message
from qdo.cli.readings import (
    SHARED,
    read_queues,
    reading_options,
    report_unasked,
    rules_of,
    watch_option,
)
from qdo.errors import DatabaseError, HistoryUnreadableError, PartialFailureError
from qdo.history.reports import usual_seconds
from qdo.ops.groups import GROUPINGS, group_items
from qdo.ops.items import QUEUE_SORTS, queue_item
from qdo.ops.status import QueueStatus, Statuses
from qdo.ops.verdicts import QueueHealth, Verdict, judge_all
from qdo.settings.settings import Settings
from qdo.text import join_some, short_duration

MOST_ETAS = 1000
"""Each is a query. Queues with larger backlogs come first."""
COLUMNS = """\b
Columns:
  STATE         one word; WHY is the reason, of the first message if several fail
  OWNER         its worker; - if it is free; (gone) if that worker no longer
                exists, as good as free; `waits for` shards that must be finished
                first; `no job` or `excluded by all workers`: none takes it;
                `assigned to` a worker that has not claimed it
  LAST          time of the last message of those that are all done
  BACKLOG       messages after LAST; ~ marks an estimate; - if it is unknown
  AGE           age of the next message; - if unknown, as with SQS without owner
  ETA           with the setting `history`: the backlog times the mean duration
                of the last ten jobs or more, for the 1,000 largest backlogs; - if
                the queue is held, blocked, or without an owner or recorded jobs
  DELAYED       messages that are not due yet, which BACKLOG leaves out
  DEAD LETTERS  - if the broker did not return their number
  ERROR         why the broker did not return the backlog; the exit code is 4

A queue that is `assigned to` a worker for longer than an instant: another program has registered
as that worker. After 10 seconds the rebalancer assigns the queue to another one."""


@click.command(epilog=COLUMNS)
@click.argument("glob", default="*")
@click.option(
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    type=click.Choice([each.value for each in QueueHealth]),
    help="Only queues in this state; can be given repeatedly.",
)
@click.option(
    "--sort",
    type=click.Choice(list(QUEUE_SORTS)),
    default="name",
    show_default=True,
    help="The worst state, the greatest age or the largest backlog first.",
)
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="List at most N queues.")
@reading_options
@watch_option
@with_settings(*SHARED, "history")
@output_option
def queues(
    glob: str,
    states: Sequence[str],
    sort: str,
    limit: int | None,
    budget: int | None,
    window: str,
    late: str,
    stuck: str,
    form: str,
    settings: Settings,
) -> None:
    """List queues that match GLOB (default: all): state, owner, progress, backlog.

    Every queue counts that has a node in the coordinator or a message in the broker; finished
    shards and queues that the broker lacks only while they have dead letters.
    """
    app = require_app(settings)
    rules = rules_of(late, stuck)
    readings = read_queues(settings, glob, budget, window)
    statuses = readings[-1]
    judged = judge_all(readings, rules)
    if not judged:
        print_message(
            f"hint: app {app!r} has no queue {'yet' if glob == '*' else f'that matches {glob!r}'}"
        )
    judged = sorted(
        (each for each in judged if not states or each[1].state.value in states),
        key=QUEUE_SORTS[sort],
    )
    shown = judged[:limit]
    items = [queue_item(*each) for each in shown]
    if settings.history:
        _add_etas(items, settings.history, app)
    if form == "table":
        for item in items:
            item["owner"] = _owner(item)
            item["last"] = item["last_time"]
            item["backlog"] = approximate(item["backlog"], item["approximate"])
            item["age"] = _age(item["behind_seconds"])
            item["eta"] = _eta(item.get("eta_seconds"))
    emit("qdo.queues/1", items, form, _columns(shown, bool(settings.history)))
    if len(shown) < len(judged):
        print_message(f"hint: {len(shown)} of {len(judged)} queues are listed; see --limit")
    _report_gaps(statuses)


def _columns(shown: Sequence[tuple[QueueStatus, Verdict]], with_etas: bool) -> dict[str, str]:
    """Return the columns of the table with their headings: those that say something."""
    found = [each for each, _ in shown]
    columns = {
        "queue": "QUEUE",
        "state": "STATE",
        "owner": "OWNER",
        "last": "LAST",
        "backlog": "BACKLOG",
        "age": "AGE",
        "eta": "ETA",
        "delayed": "DELAYED",
        "dead_letters": "DEAD LETTERS",
        "reason": "WHY",
        "error": "ERROR",
    }
    if all(each.error is None for each in found):
        del columns["error"]
    if not any(verdict.reason for _, verdict in shown):
        del columns["reason"]
    if not any(each.delayed for each in found):
        del columns["delayed"]  # most apps delay nothing
    if all(each.behind_seconds is None for each in found):
        del columns["age"]  # not every broker knows it
    if not with_etas:
        del columns["eta"]
    return columns


def _add_etas(items: list[dict[str, Any]], history: str, app: str) -> None:
    """Add the time that each backlog takes; None where nothing is known, or nothing runs."""
    runs = [
        each
        for each in items
        if each["backlog"] and not each["held"] and not each["blocked"] and each["owner"]
    ]
    largest = sorted(runs, key=lambda each: each["backlog"], reverse=True)[:MOST_ETAS]
    try:
        usual = usual_seconds(history, app, [each["queue"] for each in largest])
    except (HistoryUnreadableError, DatabaseError) as error:
        print_message(f"warning: ETAs are unknown: {error}")
        usual = {}
    for item in items:
        item["eta_seconds"] = None
    for item in largest:
        if item["queue"] in usual:
            item["eta_seconds"] = round(item["backlog"] * usual[item["queue"]], 3)


def _eta(seconds: float | None) -> str | None:
    return None if seconds is None else f"~{short_duration(seconds)}"


def _report_gaps(statuses: Statuses) -> None:
    """Tell what is missing in the list; raise an error for what could not be read."""
    found = statuses.queues
    unread = [each.queue for each in found if each.error is not None]
    report_unasked(statuses)
    if unread or statuses.unread:
        missing = [f"{join_some(unread)}, see ERROR"] if unread else []
        raise PartialFailureError(
            done=len(found) - len(unread),
            total=len(found),
            what="backlogs were read",
            rest="; ".join([*missing, *statuses.unread]),
        )


def _owner(item: dict[str, Any]) -> str | None:
    """Return the owner of a queue, or the reason why it has none."""
    owner: str | None = item["owner"]
    if owner is not None:
        return f"{owner} (gone)" if item["owner_gone"] else owner
    if item["waits_for"]:
        return f"waits for {', '.join(item['waits_for'])}"
    reason: str | None = item["untaken"] or item["unclaimed"]
    return reason


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else short_duration(seconds)


_COLUMNS = {
    "group": "GROUP",
    "queues": "QUEUES",
    "state": "WORST STATE",
    "attention": "ATTENTION",
    "age": "AGE",
    "backlog": "BACKLOG",
    "dead_letters": "DEAD LETTERS",
}


@click.command()
@click.argument("glob", default="*")
@click.option(
    "--by",
    type=click.Choice(list(GROUPINGS)),
    default="prefix",
    show_default=True,
    help="prefix: the name up to the first of - _ . / :",
)
@reading_options
@watch_option
@with_settings(*SHARED)
@output_option
def groups(
    glob: str,
    by: str,
    budget: int | None,
    window: str,
    late: str,
    stuck: str,
    form: str,
    settings: Settings,
) -> None:
    """Add up the queues that match GLOB: the worst state, how many need attention, the sums.

    AGE is that of the oldest next message. A sum is - if a part of it is unknown.
    """
    require_app(settings)
    rules = rules_of(late, stuck)
    readings = read_queues(settings, glob, budget, window)
    items = group_items(judge_all(readings, rules), by)
    if form == "table":
        for item in items:
            seconds = item["behind_seconds"]
            item["age"] = None if seconds is None else short_duration(seconds)
            item["backlog"] = approximate(item["backlog"], item["approximate"])
    emit("qdo.groups/1", items, form, _COLUMNS)
    report_unasked(readings[-1])
