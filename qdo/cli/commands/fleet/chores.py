"""`qdo chores`: what the leader cleans up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, iso_time, print_message
from qdo.fleet.chores.records import ChoreRecord, read_records
from qdo.settings.settings import Settings

_COLUMNS = ("chore", "at", "seconds", "deleted", "leader", "fault")


@click.command()
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def chores(form: str, settings: Settings) -> None:
    """List when the leader last did each of its chores, and how many nodes it deleted.

    The worker that leads does them about once a minute. Without workers nothing is cleaned up.
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
    emit("qdo.chores/1", map(_item, found), form, {name: name.upper() for name in _COLUMNS})


def _item(record: ChoreRecord) -> dict[str, Any]:
    return {**asdict(record), "at": iso_time(record.at)}
