"""`qdo queues`, `qdo workers`."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.output import emit, iso_time, say
from qdo.cli.reach import reached
from qdo.cli.shell import output_option, require_app, with_settings
from qdo.message import format_position
from qdo.ops import status
from qdo.settings import Settings

SHARED = ("app", "broker", "coordinator", "namespace", "connect_seconds")


@click.command()
@click.argument("glob", default="*")
@with_settings(*SHARED)
@output_option
def queues(glob: str, form: str, settings: Settings) -> None:
    """List queues that match GLOB (default: all): owner, progress, backlog, dead letters."""
    app = require_app(settings)
    with reached(settings) as reach:
        found = status.queue_statuses(reach.client, reach.layout, reach.broker, glob)
    if not found:
        say(f"hint: app {app!r} has no queue {'yet' if glob == '*' else f'that matches {glob!r}'}")
    items = [_queue_item(each) for each in found]
    if form == "table":
        for item in items:
            item["owner"] = _owner(item)
            item["last"] = item["fault"] or item["last_time"]
            item["failing"] = _trouble(item["failing"], item["blocked"])
    columns = {
        "queue": "QUEUE",
        "owner": "OWNER",
        "last": "LAST",
        "backlog": "BACKLOG",
        "delayed": "DELAYED",
        "dead_letters": "DEAD LETTERS",
        "failing": "FAILING",
    }
    if not any(each.marks for each in found):
        del columns["failing"]
    if not any(each.delayed for each in found):
        del columns["delayed"]  # most apps delay nothing
    emit("qdo.queues/1", items, form, columns)


def _owner(item: dict[str, Any]) -> str | None:
    """Return who has a queue, in words."""
    owner: str | None = item["owner"]
    if owner is not None:
        return f"{owner} (gone)" if item["owner_gone"] else owner
    return "no worker takes it" if item["untaken"] else None


def _trouble(failing: dict[str, Any] | None, blocked: dict[str, Any] | None) -> str | None:
    """Return how the message at the head of a queue fails, in words."""
    if blocked is not None:
        since = iso_time(blocked["since"])
        return f"blocked since {since}, {blocked['attempts']} attempts: {blocked['error']}"
    return f"{failing['attempts']} attempts: {failing['error']}" if failing is not None else None


def _queue_item(each: status.QueueStatus) -> dict[str, Any]:
    marks = each.marks
    return {
        "queue": each.queue,
        "owner": each.owner,
        "owner_gone": each.owner_gone,
        "untaken": each.untaken,
        "last": str(each.last) if each.last else "",
        "last_time": format_position(each.last) if each.last else None,
        "backlog": each.backlog,
        "oldest": str(each.oldest) if each.oldest else None,
        "delayed": each.delayed,
        "dead_letters": each.dead_letters,
        "fault": each.fault,
        "failing": marks.dump() if marks is not None and not marks.blocked else None,
        "blocked": marks.dump() if marks is not None and marks.blocked else None,
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
