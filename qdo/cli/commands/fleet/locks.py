"""`qdo locks`: who holds the locks of an app, and who waits."""

from __future__ import annotations

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, iso_time, print_message
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
