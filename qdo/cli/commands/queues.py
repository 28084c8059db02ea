"""`qdo queues`: the queues, with owners, progress and backlogs."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.durations import short_duration
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, iso_time, print_message
from qdo.errors import PartialFailureError
from qdo.ops import status
from qdo.positions import format_last
from qdo.settings.settings import Settings
from qdo.text import join_some, pluralize

SHARED = ("app", "broker", "coordinator", "namespace", "connect_seconds")


@click.command()
@click.argument("glob", default="*")
@click.option(
    "--budget",
    metavar="N",
    type=click.IntRange(min=0),
    help="Request at most N backlogs from brokers that need a request for each (default 100).",
)
@with_settings(*SHARED)
@output_option
def queues(glob: str, budget: int | None, form: str, settings: Settings) -> None:
    """List queues that match GLOB (default: all): owner, progress, backlog, dead letters."""
    app = require_app(settings)
    with open_connections(settings) as connections:
        statuses = status.queue_statuses(
            connections.client, connections.layout, connections.broker, glob, budget
        )
    found = statuses.queues
    if not found:
        print_message(
            f"hint: app {app!r} has no queue {'yet' if glob == '*' else f'that matches {glob!r}'}"
        )
    items = [_queue_item(each) for each in found]
    if form == "table":
        for item in items:
            item["owner"] = _owner(item)
            item["last"] = item["fault"] or item["last_time"]
            item["failing"] = _trouble(item)
            item["backlog"] = _count(item["backlog"], item["approximate"])
            item["age"] = _age(item["behind_seconds"])
    columns = {
        "queue": "QUEUE",
        "owner": "OWNER",
        "last": "LAST",
        "backlog": "BACKLOG",
        "age": "AGE",
        "delayed": "DELAYED",
        "dead_letters": "DEAD LETTERS",
        "held": "HELD",
        "failing": "FAILING",
        "error": "ERROR",
    }
    if all(each.error is None for each in found):
        del columns["error"]
    if not any(each.marks for each in found):
        del columns["failing"]
    if not any(each.held for each in found):
        del columns["held"]
    if not any(each.delayed for each in found):
        del columns["delayed"]  # most apps delay nothing
    if all(each.behind_seconds is None for each in found):
        del columns["age"]  # few brokers report it
    emit("qdo.queues/1", items, form, columns)
    _report_gaps(statuses)


def _report_gaps(statuses: status.Statuses) -> None:
    """Tell what is missing in the list; raise an error for what could not be read."""
    found = statuses.queues
    unread = [each.queue for each in found if each.error is not None]
    if statuses.unasked:
        print_message(
            f"{statuses.unasked} of {len(found)} backlogs were not requested, because each needs "
            "a request; failing queues, queues without a worker and those longest without "
            "progress come first; --budget N requests more"
        )
    for what, reason in statuses.unread.items():
        print_message(f"cannot read {what}: {reason}")
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


def _count(backlog: int | None, approximate: bool) -> str | int | None:
    return f"~{backlog}" if approximate and backlog is not None else backlog


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else short_duration(seconds)


def _trouble(item: dict[str, Any]) -> str | None:
    """Return a description of the failing messages of a queue."""
    failing, blocked, also = item["failing"], item["blocked"], item["also_blocked"]
    if blocked is not None:
        since = iso_time(blocked["blocked_since"])
        more = f"; {len(also)} more block it" if also else ""
        attempts = pluralize(blocked["attempts"], "attempt")
        return f"blocked since {since}, {attempts}: {blocked['error']}{more}"
    if failing is not None:
        failed = failing["attempts"]
        return f"{pluralize(failed, 'attempt') if failed else 'waits'}: {failing['error']}"
    return None


def _queue_item(each: status.QueueStatus) -> dict[str, Any]:
    marks = each.marks
    return {
        "queue": each.queue,
        "owner": each.owner,
        "owner_gone": each.owner_gone,
        "untaken": each.untaken,
        "unclaimed": each.unclaimed,
        "waits_for": each.waits_for,
        "last": str(each.last) if each.last else "",
        "last_time": format_last(each.last),
        "position": each.position,
        "backlog": each.backlog,
        "approximate": each.approximate,
        "behind_seconds": each.behind_seconds,
        "oldest": str(each.oldest) if each.oldest else None,
        "delayed": each.delayed,
        "dead_letters": each.dead_letters,
        "fault": each.fault,
        "error": each.error,
        "held": each.held,
        "failing": marks.dump() if marks is not None and not marks.blocked else None,
        "blocked": marks.dump() if marks is not None and marks.blocked else None,
        "also_blocked": [other.dump() for other in each.also_blocking],
    }
