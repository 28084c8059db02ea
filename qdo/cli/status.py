"""`qdo queues`, `qdo workers`."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.output import emit, iso_time, say
from qdo.cli.reach import reached
from qdo.cli.shell import output_option, require_app, with_settings
from qdo.cli.times import short_duration
from qdo.describe import counted
from qdo.message import format_last
from qdo.ops import status
from qdo.settings import Settings

SHARED = ("app", "broker", "coordinator", "namespace", "connect_seconds")


@click.command()
@click.argument("glob", default="*")
@click.option(
    "--budget",
    metavar="N",
    type=click.IntRange(min=0),
    help="Ask for N backlogs at most where each is a request (default 100).",
)
@with_settings(*SHARED)
@output_option
def queues(glob: str, budget: int | None, form: str, settings: Settings) -> None:
    """List queues that match GLOB (default: all): owner, progress, backlog, dead letters."""
    app = require_app(settings)
    with reached(settings) as reach:
        statuses = status.queue_statuses(reach.client, reach.layout, reach.broker, glob, budget)
    found = statuses.queues
    if not found:
        say(f"hint: app {app!r} has no queue {'yet' if glob == '*' else f'that matches {glob!r}'}")
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
        "failing": "FAILING",
    }
    if not any(each.marks for each in found):
        del columns["failing"]
    if not any(each.delayed for each in found):
        del columns["delayed"]  # most apps delay nothing
    if all(each.behind_seconds is None for each in found):
        del columns["age"]  # few brokers say it
    emit("qdo.queues/1", items, form, columns)
    if statuses.unasked:
        say(
            f"{statuses.unasked} of {len(found)} backlogs were not asked for, each is a request:"
            " failing queues, those without a worker and the longest unmoved come first;"
            " --budget N asks for more"
        )


def _owner(item: dict[str, Any]) -> str | None:
    """Return who has a queue, in words."""
    owner: str | None = item["owner"]
    if owner is not None:
        return f"{owner} (gone)" if item["owner_gone"] else owner
    if item["waits_for"]:
        return f"waits for {', '.join(item['waits_for'])}"
    return "no worker takes it" if item["untaken"] else None


def _count(backlog: int | None, approximate: bool) -> str | int | None:
    return f"~{backlog}" if approximate and backlog is not None else backlog


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else short_duration(seconds)


def _trouble(item: dict[str, Any]) -> str | None:
    """Return how messages of a queue fail, in words."""
    failing, blocked, also = item["failing"], item["blocked"], item["also_blocked"]
    if blocked is not None:
        since = iso_time(blocked["since"])
        more = f"; {len(also)} more block it" if also else ""
        attempts = counted(blocked["attempts"], "attempt")
        return f"blocked since {since}, {attempts}: {blocked['error']}{more}"
    if failing is not None:
        return f"{counted(failing['attempts'], 'attempt')}: {failing['error']}"
    return None


def _queue_item(each: status.QueueStatus) -> dict[str, Any]:
    marks = each.marks
    return {
        "queue": each.queue,
        "owner": each.owner,
        "owner_gone": each.owner_gone,
        "untaken": each.untaken,
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
        "failing": marks.dump() if marks is not None and not marks.blocked else None,
        "blocked": marks.dump() if marks is not None and marks.blocked else None,
        "also_blocked": [other.dump() for other in each.also_blocking],
    }


@click.command()
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def workers(form: str, settings: Settings) -> None:
    """List the registered workers, how many queues each handles, and where it runs."""
    app = require_app(settings)
    with reached(settings, broker=False) as reach:
        found = status.worker_statuses(reach.client, reach.layout) if reach.client else []
    if not found:
        say(f"hint: no worker of app {app!r} is registered")
    items = [_worker_item(each) for each in found]
    if form == "table":
        for item in items:
            item["started"] = _moment(item.get("started"))
        for item, each in zip(items, found, strict=True):
            item["takes"] = str(each.takes)
    columns = {
        "worker": "WORKER",
        "queues": "QUEUES",
        "assigned": "ASSIGNED",
        "host": "HOST",
        "pid": "PID",
        "state": "STATE",
        "started": "STARTED",
        "version": "VERSION",
        "takes": "TAKES",
    }
    if all(each.takes.everything for each in found):
        del columns["takes"]
    emit("qdo.workers/1", items, form, columns)


def _worker_item(each: status.WorkerStatus) -> dict[str, Any]:
    known: dict[str, Any] = {
        "worker": each.worker,
        "queues": each.queues,
        "assigned": each.assigned,
        "takes": {"queues": each.takes.queues, "exclude": each.takes.exclude},
    }
    return {**known, **dict(each.details), **known}


def _moment(value: Any) -> str | None:
    return iso_time(value) if isinstance(value, int | float) else value
