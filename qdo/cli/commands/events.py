"""The command `qdo events`, which shows past and current changes in an app."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import click

from qdo.cli.connections import open_connections
from qdo.cli.options import (
    DURATION,
    PERIOD,
    duration_option,
    limit_option,
    require_app,
    with_settings,
)
from qdo.cli.output import cell, iso_time, print_message
from qdo.cli.readings import SHARED, read_statuses
from qdo.connections.opened import Connections
from qdo.errors import QdoError, UnreachableError, UsageError
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from qdo.history.reports import claims
from qdo.ops.changes import Difference, Look, changes, ends_of, event_item, past_changes
from qdo.ops.verdicts import judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.settings.settings import Settings

# Number of the newest entries of the action log that the command reads at once.
ENTRIES = 200


@click.command("events")
@click.argument("glob", default="*")
@duration_option("--since", "1h", "Only what changed at most this long ago: 2h, 7d.")
@limit_option(50, "The number of past events, the newest of them.")
@click.option("--follow", is_flag=True, help="Continue with later changes, until you interrupt it.")
@duration_option("--every", "5s", "How often to look.", PERIOD)
@click.option("--for", "lasting", type=DURATION, help="Stop following after this time.")
@click.option("-o", "--output", "form", type=click.Choice(["table", "jsonl"]), default="table")
@with_settings(*SHARED, "history")
def show_events(
    glob: str,
    since: float,
    limit: int,
    follow: bool,
    every: float,
    lasting: float | None,
    form: str,
    settings: Settings,
) -> None:
    """List what changed, one line for each event, the newest last.

    Of the past, commands of operators are known, when the present workers started, which were lost,
    and which processes died and were replaced; with the setting `history` also changes of owner of
    queues that match GLOB.

    With --follow, events are also all workers that come and go, new and deleted queues, and changes
    of owner and state of these queues. What comes and goes between two looks is not seen. For tens
    of thousands of queues choose a longer --every: each look reads as much as `qdo queues`.

    With -o jsonl, the keys are time, kind (worker, queue, owner, state, or the command), subject,
    before, after, reason and by.
    """
    require_app(settings)
    if lasting is not None and not follow:
        raise UsageError(reason="--for needs --follow")
    write_past = partial(_write_past, settings, glob, time.time() - since, limit, form)
    if follow:
        until = None if lasting is None else time.monotonic() + lasting
        _follow(settings, glob, form, every, until, write_past)
        return
    with open_connections(settings, broker=False) as connections:
        count = write_past(*_around(connections, limit + 1))
    if count > limit:
        print_message(f"hint: only the newest {limit} events are listed; see --limit and --since")
    elif not count:
        print_message("hint: no event is known; see --since, and --follow for those to come")


def _write_past(
    settings: Settings,
    glob: str,
    since: float,
    limit: int,
    form: str,
    workers: Sequence[WorkerStatus],
    entries: Sequence[AuditEntry],
) -> int:
    """Write past events, oldest first. Return the number of all events in the sources."""
    recorded = []
    if settings.history:
        try:
            recorded = claims(settings.history, settings.app, since, glob, limit=limit + 1)
        except QdoError as error:
            print_message(f"hint: changes of owner are left out: {error}")
    past = past_changes(entries, workers, recorded, since)
    for at, change in past[-limit:]:
        _write(at, change, form)
    return len(past)


def _follow(
    settings: Settings,
    glob: str,
    form: str,
    pause: float,
    until: float | None,
    write_past: Callable[[Sequence[WorkerStatus], Sequence[AuditEntry]], int],
) -> None:
    """Write past events and then new changes, until a time of the monotonic clock or forever."""
    before: Look | None = None
    while True:
        try:
            after, workers = _look(settings, glob)
        except UnreachableError as error:
            print_message(f"cannot look: {error}")
        else:
            if before is None:
                # The past events come from the first reading. Therefore no event between past and
                # new events is missing.
                write_past(workers, after.entries)
                print_message(f"following {len(after.judged)} queues, {len(after.workers)} workers")
            for change in changes(before, after) if before is not None else ():
                _write(time.time(), change, form)
            before = after
        if until is not None and time.monotonic() + pause > until:
            return
        time.sleep(pause)


def _look(settings: Settings, glob: str) -> tuple[Look, list[WorkerStatus]]:
    with open_connections(settings) as connections:
        statuses = read_statuses(connections, glob)
        workers, entries = _around(connections, ENTRIES)
    names = [each.worker for each in workers]
    return Look(judge_all([statuses]), names, entries, [*ends_of(workers)]), workers


def _around(connections: Connections, limit: int) -> tuple[list[WorkerStatus], list[AuditEntry]]:
    """Return the workers, and at most `limit` of the newest entries of the action log."""
    client = connections.client
    layout = connections.layout
    if client is None:
        return [], []
    return worker_statuses(client, layout), read_entries(client, layout, limit=limit)


def _write(at: float, change: Difference, form: str) -> None:
    if form == "jsonl":
        print(json.dumps(event_item(at, change)), flush=True)
        return
    values = f"{change.before} -> {change.after or 'none'}" if change.before else change.after
    by = f"by {change.by}" if change.by else ""
    parts = [iso_time(at) or "", change.kind, change.subject, values, by, change.reason]
    sys.stdout.write("  ".join(cell(part) for part in parts if part) + "\n")
    sys.stdout.flush()
