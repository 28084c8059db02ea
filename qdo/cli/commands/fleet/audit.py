"""`qdo audit`: what operators changed."""

from __future__ import annotations

import time
from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, parse_duration, print_message, values_text
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from qdo.ops.items import audit_item
from qdo.settings.settings import Settings


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
    items = [_item(each, form) for each in found[:limit]]
    columns = ["time", "by", "command", "target", "from", "to", "reason"]
    if any(each.fault is not None for each in found):
        columns.append("fault")
    emit("qdo.audit/1", items, form, {name: name.upper() for name in columns})
    if len(found) > limit:
        print_message(f"hint: only the newest {limit} entries are listed; see --limit and --since")


def _item(entry: AuditEntry, form: str) -> dict[str, Any]:
    item = audit_item(entry)
    if form == "table":
        item |= {"from": values_text(entry.before), "to": values_text(entry.after)}
    return item
