"""`qdo groups`: queues added up."""

from __future__ import annotations

import click

from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import approximate, emit
from qdo.cli.readings import SHARED, read_queues, reading_options, report_unasked, rules_of
from qdo.cli.watching import watch_option
from qdo.ops.groups import GROUPINGS, group_items
from qdo.ops.verdicts import judge_all
from qdo.settings.settings import Settings
from qdo.text import short_duration

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

    AGE is that of the oldest next message.
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
