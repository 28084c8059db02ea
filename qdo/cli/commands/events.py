"""`qdo events`: what changes in an app, as it happens."""

from __future__ import annotations

import json
import sys
import time

import click

from qdo.cli.connections import open_connections
from qdo.cli.durations import parse_duration
from qdo.cli.framework import require_app, with_settings
from qdo.cli.output import cell, iso_time, print_message
from qdo.cli.readings import SHARED
from qdo.errors import UnreachableError, UsageError
from qdo.fleet.actions import list_workers
from qdo.fleet.audit import read_entries
from qdo.ops.changes import Difference, Look, changes, event_item
from qdo.ops.status import queue_statuses
from qdo.ops.verdicts import judge_all
from qdo.sending.connections import Connections
from qdo.settings.settings import Settings

ENTRIES = 200
"""The newest entries of the action log that are read at a time."""
LEAST_SECONDS = 0.5


@click.command("events")
@click.argument("glob", default="*")
@click.option(
    "--every", metavar="DURATION", default="5s", show_default=True, help="How often to look."
)
@click.option("--for", "lasting", metavar="DURATION", help="End after this time.")
@click.option("-o", "--output", "form", type=click.Choice(["table", "jsonl"]), default="table")
@with_settings(*SHARED)
def follow_events(
    glob: str, every: str, lasting: str | None, form: str, settings: Settings
) -> None:
    """Follow what changes, one line for each event, until you interrupt it.

    Events are workers that come and go, new and deleted queues, changes of owner and state of
    queues that match GLOB, and commands of operators. What comes and goes between two looks is not
    seen.
    """
    require_app(settings)
    pause = parse_duration(every, "--every")
    if pause < LEAST_SECONDS:
        raise UsageError(reason=f"--every must be at least {LEAST_SECONDS:g}s, got {every!r}")
    until = None if lasting is None else time.monotonic() + parse_duration(lasting, "--for")
    before: Look | None = None
    while True:
        try:
            after = _look(settings, glob)
        except UnreachableError as error:
            print_message(f"cannot look: {error}")
        else:
            for change in changes(before, after) if before is not None else ():
                _write(change, form)
            if before is None:
                print_message(f"following {len(after.judged)} queues, {len(after.workers)} workers")
            before = after
        if until is not None and time.monotonic() + pause > until:
            return
        time.sleep(pause)


def _look(settings: Settings, glob: str) -> Look:
    with open_connections(settings) as connections:
        return _read(connections, glob)


def _read(connections: Connections, glob: str) -> Look:
    client, layout = connections.client, connections.layout
    statuses = queue_statuses(client, layout, connections.broker, glob)
    workers = list_workers(client, layout) if client else []
    entries = read_entries(client, layout, limit=ENTRIES) if client else []
    return Look(judge_all([statuses]), workers, entries)


def _write(change: Difference, form: str) -> None:
    now = time.time()
    if form == "jsonl":
        print(json.dumps(event_item(now, change)), flush=True)
        return
    values = " -> ".join(text for text in (change.before, change.after) if text)
    by = f"by {change.by}" if change.by else ""
    parts = [iso_time(now) or "", change.kind, change.subject, values, by, change.reason]
    sys.stdout.write("  ".join(cell(part) for part in parts if part) + "\n")
    sys.stdout.flush()
