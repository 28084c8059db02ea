"""`qdo workers`: the registered workers and their state."""

from __future__ import annotations

import time
from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, iso_time, print_message
from qdo.cli.readings import watch_option
from qdo.ops.items import worker_item
from qdo.ops.worker_status import worker_statuses
from qdo.settings.settings import Settings
from qdo.text import join_some, short_duration


@click.command()
@watch_option
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def workers(form: str, settings: Settings) -> None:
    """List the registered workers with their hosts and their numbers of queues.

    REPORTED is the age of a worker's last report. A worker that died unnoticed stays registered
    until its session ends, but reports nothing.
    """
    app = require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client = connections.client
        found = worker_statuses(client, connections.layout) if client else []

    if not found:
        print_message(f"hint: no worker of app {app!r} is registered")
    items = [worker_item(each) for each in found]
    if form == "table":
        for item in items:
            item["started"] = _moment(item.get("started"))
            item["reported"] = _age(item["reported"])
        for item, each in zip(items, found, strict=True):
            item["filter"] = str(each.takes)
            item["jobs"] = join_some(each.takes.jobs)
    columns = {
        "worker": "WORKER",
        "queues": "QUEUES",
        "assigned": "ASSIGNED",
        "host": "HOST",
        "pid": "PID",
        "state": "STATE",
        "reported": "REPORTED",
        "started": "STARTED",
        "version": "VERSION",
        "filter": "FILTER",
        "jobs": "JOBS",
        "fault": "FAULT",
    }
    if all(each.fault is None for each in found):
        del columns["fault"]
    if not any(str(each.takes) for each in found):
        del columns["filter"]
    if all("*" in each.takes.jobs for each in found):
        del columns["jobs"]
    emit("qdo.workers/1", items, form, columns)


def _age(reported: float) -> str | None:
    return f"{short_duration(time.time() - reported)} ago" if reported else None


def _moment(value: Any) -> str | None:
    return iso_time(value) if isinstance(value, int | float) else value
