"""`qdo locks`, `qdo chores` and `qdo audit`: what the processes and the operators of an app did."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, iso_time, parse_duration, print_message, values_text
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from qdo.fleet.chores import ChoreRecord, read_records
from qdo.ops.items import audit_item
from qdo.ops.locks import locks as read_locks
from qdo.settings.settings import Settings


@click.command()
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def locks(form: str, settings: Settings) -> None:
    """List the holders of each lock of an app, and those who wait for it, in their order."""
    require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client = connections.client
        rows = read_locks(client, connections.layout) if client else []
    if not rows:
        print_message("hint: nobody holds a lock or waits for one")
    items = [
        {
            "lock": row.lock,
            "state": "held" if row.holds else "waiting",
            "kind": "shared" if row.shared else "exclusive",
            "who": row.who,
            "since": iso_time(row.since),
            "why": row.why,
        }
        for row in rows
    ]
    columns = ("lock", "state", "kind", "who", "since", "why")
    emit("qdo.locks/1", items, form, {name: name.upper() for name in columns})


_COLUMNS = ("chore", "at", "seconds", "deleted", "leader", "fault")


@click.command()
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def chores(form: str, settings: Settings) -> None:
    """List when the leader last did each of its chores, and how many nodes it deleted.

    The worker that leads does them about once a minute. Without workers nothing is cleaned up.
    FAULT says why a chore failed; the leader logs it, and repeats the chore in the next minute.

    \b
    copied-actions  copies entries of `qdo audit` to the history, if there is one
    lost-actions    ends what workers that are gone were asked for
    action-outputs  deletes stacks and profiles after an hour, and beyond 100
    action-log      deletes entries after 30 days, and beyond 5,000
    format-level    raises the level once all workers have a new version
    live-settings   deletes versions beyond the last 100
    empty-locks     deletes nodes of locks that were unused for an hour
    """
    app = require_app(settings)
    found: list[ChoreRecord] = []
    fault = None
    with open_connections(settings, broker=False) as connections:
        if connections.client is not None:
            found, fault = read_records(connections.client, connections.layout)
    if fault is not None:
        path = connections.layout.fleet.chores
        print_message(f"warning: {path} cannot be read: {fault}; the leader will write it again")
    elif not found:
        print_message(f"hint: no leader of app {app!r} has done chores yet")
    emit("qdo.chores/1", map(_chore_item, found), form, {name: name.upper() for name in _COLUMNS})


def _chore_item(record: ChoreRecord) -> dict[str, Any]:
    return {**asdict(record), "at": iso_time(record.at)}


@click.command()
@click.argument("glob", default="*")
@click.option("--since", metavar="DURATION", help="Only entries at most this old: 2h, 7d.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="The number of entries, the newest first.",
)
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def audit(glob: str, since: str | None, limit: int, form: str, settings: Settings) -> None:
    """List the changes that operators made with commands, newest first.

    GLOB selects entries by their command, or by the name of what was changed, such as a queue; a
    change of all queues of a glob counts for each of them. The log keeps the last 5,000 entries,
    for 30 days.
    """
    app = require_app(settings)
    oldest = 0.0 if since is None else time.time() - parse_duration(since, "--since")
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        found = []
        if client is not None:
            found = read_entries(
                client,
                layout,
                limit=limit + 1,
                selects=lambda each: each.matches(glob),
                since=oldest,
            )
    if not found:
        print_message(f"hint: no entry in the action log of app {app!r} matches")
    items = [_audit_item(each, form) for each in found[:limit]]
    columns = ["time", "by", "command", "target", "from", "to", "reason"]
    if any(each.fault is not None for each in found):
        columns.append("fault")
    emit("qdo.audit/1", items, form, {name: name.upper() for name in columns})
    if len(found) > limit:
        print_message(f"hint: only the newest {limit} entries are listed; see --limit and --since")


def _audit_item(entry: AuditEntry, form: str) -> dict[str, Any]:
    item = audit_item(entry)
    if form == "table":
        item |= {"from": values_text(entry.before), "to": values_text(entry.after)}
    return item
