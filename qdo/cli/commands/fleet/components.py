"""`qdo components`: the processes of an app."""

from __future__ import annotations

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.fleet.components import read_components, skew
from qdo.ops.items import component_item
from qdo.settings.settings import Settings

_COLUMNS = ("kind", "host", "pid", "version", "level", "zone", "state", "busy", "live", "fault")


@click.command()
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def components(form: str, settings: Settings) -> None:
    """List the processes of an app with their versions.

    BUSY is the number of queues with a job that runs. `qdo workers` lists the workers with their
    queues instead. LIVE is the version of the live settings in use, see `qdo settings`.
    """
    app = require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client = connections.client
        found = read_components(client, connections.layout) if client else []
    if not found:
        print_message(f"hint: no process of app {app!r} is registered")
    columns = {name: name.upper() for name in _COLUMNS}
    if all(each.fault is None for each in found):
        del columns["fault"]
    if not any(each.live for each in found):
        del columns["live"]
    emit("qdo.components/1", [component_item(each) for each in found], form, columns)
    versions = skew(found)
    if versions:
        print_message(f"hint: the processes have different versions of qdo: {versions}")
