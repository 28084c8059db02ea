"""The command `qdo queues`, which shows queues or sums of queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.options import import_settings, limit_option, require_app, with_output
from qdo.cli.output import backlog_cells, duration_text, emit, print_message
from qdo.cli.readings import (
    SHARED,
    ReadOptions,
    owner_text,
    read_queues,
    reading_options,
    report_unasked,
    watch_option,
)
from qdo.errors import DatabaseError, HistoryUnreadableError, PartialFailureError, UsageError
from qdo.fleet.names import only_name
from qdo.ops.items import GROUPINGS, QUEUE_SORTS, group_items, queue_item
from qdo.ops.verdicts import QueueHealth, Verdict, judge_all
from qdo.text import join_some

if TYPE_CHECKING:
    from qdo.ops.status import QueueStatus, Statuses
    from qdo.settings.settings import Settings

_SETTINGS = (*SHARED, "history")
_COLUMNS = (
    *("queue", "state", "owner", "last", "backlog", "age", "eta", "delayed", "dead_letters"),
    *("why", "error"),
)
_GROUP_COLUMNS = {
    "group": "GROUP",
    "queues": "QUEUES",
    "state": "WORST STATE",
    "attention": "ATTENTION",
    "age": "AGE",
    "backlog": "BACKLOG",
    "dead_letters": "DEAD LETTERS",
}
# Maximum number of ETAs, because each ETA needs a query. Queues with larger backlogs come first.
MOST_ETAS = 1000
_HELP = """\b
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


class _State(click.Choice[str]):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if "," in value:
            repeated = " ".join(f"--state {each.strip()}" for each in value.split(","))
            self.fail(f"must be one state, got {value!r}; give {repeated}", param, ctx)
        return super().convert(value, param, ctx)


@click.command(epilog=_HELP)
@click.argument("names", metavar="[GLOB | NAME...]", nargs=-1)
@click.option(
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    type=_State([each.value for each in QueueHealth]),
    help="Only queues in this state; can be given repeatedly.",
)
@click.option(
    "--sort",
    type=click.Choice(list(QUEUE_SORTS)),
    help="The worst state, the greatest age or the largest backlog first; by default by name.",
)
@limit_option(None, "List at most N queues.")
@click.option("--by", type=click.Choice(list(GROUPINGS)), help="Add up the queues; see above.")
@click.option("--no-ask", is_flag=True, help="With NAME: only read; do not ask the owner.")
@reading_options
@with_output(*_SETTINGS, import_app=False)
@watch_option
def queues(
    names: tuple[str, ...],
    states: Sequence[str],
    sort: str | None,
    limit: int | None,
    by: str | None,
    no_ask: bool,
    reading: ReadOptions,
    form: str,
    settings: Settings,
) -> None:
    """List the queues that match GLOB (default: all), or show everything about each NAME.

    \b
    qdo queues               state, owner, progress and backlog of all queues
    qdo queues 'mail-*'      the same of those that match
    qdo queues mail-7 audit  everything about these two
    qdo queues --by prefix   the worst state and the sums of the queues whose
                             names are equal up to the first of - _ . / :

    An argument without *, ? and [ is a NAME, unless --state, --sort, --limit or --by asks for a
    list. In a NAME, write [*], [?] and [[] for these letters.

    Every queue counts that has a node in the coordinator or a message in the broker; finished
    shards and queues that the broker lacks only while they have dead letters. With --by, AGE is
    that of the oldest next message, and a sum is - if a part of it is unknown.

    The job of a NAME is known if --app is MODULE:APP. The owner is asked for its messages in
    flight, as `qdo ps` does: up to ten, and the stack of the first. It has two seconds; without an
    answer the command says so, and shows the longest run that it reported. With -o json, the items
    are those of the list with `process`, `job`, `failing_id`, `changes`, `owners`, `runs`,
    `in_flight` and `runs_error`.
    """
    app, settings = import_settings(settings, _SETTINGS)
    require_app(settings)
    lists = states or sort or limit or by
    exact = [] if lists else [name for name in map(only_name, names) if name is not None]
    if len(names) > max(1, len(exact)):
        raise UsageError(reason=f"give one GLOB, or several NAMEs, got {' '.join(names)}")
    if by and (sort or limit):
        raise UsageError(reason="--by lists sums; leave out --sort and --limit")
    if exact:
        from qdo.cli.commands.show import show_queues

        show_queues(exact, reading, form, app, settings, asks=not no_ask)
    elif by:
        _add_up(names, states, by, reading, form, settings)
    else:
        _list(names, states, sort or "name", limit, reading, form, settings)


def _judged(
    names: Sequence[str], states: Sequence[str], reading: ReadOptions, settings: Settings
) -> tuple[list[tuple[QueueStatus, Verdict]], Statuses]:
    glob = names[0] if names else "*"
    with open_connections(settings) as connections:
        readings = read_queues(connections, glob, reading)
    if not readings[-1].queues:
        which = "yet" if glob == "*" else f"that matches {glob!r}"
        print_message(f"hint: app {settings.app!r} has no queue {which}")
    judged = judge_all(readings, reading.rules)
    return [each for each in judged if not states or each[1].state.value in states], readings[-1]


def _list(
    names: Sequence[str],
    states: Sequence[str],
    sort: str,
    limit: int | None,
    reading: ReadOptions,
    form: str,
    settings: Settings,
) -> None:
    judged, statuses = _judged(names, states, reading, settings)
    listed = sorted(judged, key=QUEUE_SORTS[sort])[:limit]
    items = [queue_item(*each) for each in listed]
    if settings.history:
        _add_etas(items, settings.history, settings.app)
    columns = [each for each in _COLUMNS if each != "eta" or settings.history]
    emit("qdo.queues/1", items, form, columns, cells=_queue_cells)
    if len(listed) < len(judged):
        print_message(f"hint: {len(listed)} of {len(judged)} queues are listed; see --limit")
    _report_gaps(statuses)


def _queue_cells(item: Mapping[str, Any]) -> dict[str, Any]:
    eta = duration_text(item.get("eta_seconds"))
    return {
        **backlog_cells(item),
        "owner": owner_text(item),
        "last": item["last_time"],
        "delayed": item["delayed"] or None,  # most apps do not delay messages
        "eta": eta and f"~{eta}",
        "why": item["reason"],
    }


def _add_etas(items: list[dict[str, Any]], history: str, app: str) -> None:
    """Add the time that each backlog needs; None if the time is unknown or no worker runs."""
    runs = [
        each
        for each in items
        if each["backlog"] and not each["held"] and not each["blocked"] and each["owner"]
    ]
    largest = sorted(runs, key=lambda each: each["backlog"], reverse=True)[:MOST_ETAS]
    from qdo.history.reports import usual_seconds  # only an app with a history needs SQLAlchemy

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


def _report_gaps(statuses: Statuses) -> None:
    """Report gaps in the list. Raise an error if some backlogs could not be read."""
    unread = [each.queue for each in statuses.queues if each.error is not None]
    report_unasked(statuses)
    if unread or statuses.unread:
        missing = [f"{join_some(unread)}, see ERROR"] if unread else []
        raise PartialFailureError(
            done=len(statuses.queues) - len(unread),
            total=len(statuses.queues),
            what="backlogs were read",
            rest="; ".join([*missing, *statuses.unread]),
        )


def _add_up(
    names: Sequence[str],
    states: Sequence[str],
    by: str,
    reading: ReadOptions,
    form: str,
    settings: Settings,
) -> None:
    """List sums of groups of queues. The age is the age of the oldest next message."""
    judged, statuses = _judged(names, states, reading, settings)
    emit("qdo.groups/1", group_items(judged, by), form, _GROUP_COLUMNS, cells=backlog_cells)
    report_unasked(statuses)
