"""`qdo locks` and `qdo audit`: the locks of an app, and the changes that operators made."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import click

from qdo.cli.connections import from_coordinator
from qdo.cli.options import COORDINATOR, output_option, require_app, with_settings
from qdo.cli.output import (
    emit,
    emit_newest,
    filled_columns,
    iso_time,
    parse_duration,
    print_message,
    values_text,
)
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from qdo.ops.items import audit_item
from qdo.ops.locks import locks as read_locks
from qdo.settings.settings import Settings


@click.command()
@with_settings(*COORDINATOR)
@output_option
def locks(form: str, settings: Settings) -> None:
    """List the holders of each lock of an app, and the processes that wait for it, in order."""
    rows = from_coordinator(settings, read_locks, [])
    if not rows:
        print_message("hint: no process holds a lock or waits for one")
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
    emit("qdo.locks/1", items, form, columns)


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
@with_settings(*COORDINATOR)
@output_option
def audit(glob: str, since: str | None, limit: int, form: str, settings: Settings) -> None:
    """List the changes that operators made with commands, newest first.

    GLOB selects entries by their command, or by the name of what was changed, such as a queue; a
    change of all queues of a glob counts for each of them. The log keeps the last 5,000 entries,
    for 30 days.
    """
    app = require_app(settings)
    oldest = 0.0 if since is None else time.time() - parse_duration(since, "--since")
    read = partial(
        read_entries, limit=limit + 1, selects=lambda each: each.matches(glob), since=oldest
    )
    found = from_coordinator(settings, read, [])
    items = [_audit_item(each, form) for each in found]
    columns = ("time", "by", "command", "target", "from", "to", "reason", "fault")
    emit_newest(
        "qdo.audit/1",
        items,
        limit,
        form,
        filled_columns(columns, items, ("fault",)),
        nouns="entries",
        empty=f"no entry in the action log of app {app!r} matches",
    )


def _audit_item(entry: AuditEntry, form: str) -> dict[str, Any]:
    item = audit_item(entry)
    if form == "table":
        item |= {"from": values_text(entry.before), "to": values_text(entry.after)}
    return item
