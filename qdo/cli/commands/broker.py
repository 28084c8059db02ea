"""`qdo broker`: the broker file that the workers of an app share."""

from __future__ import annotations

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.ops.broker import broker_node, reset_broker
from qdo.settings.settings import Settings


@click.command()
@click.option("--reset", is_flag=True, help="Forget the file: the next worker decides.")
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def broker(reset: bool, form: str, settings: Settings) -> None:
    """Show the broker file that all workers of an app must use, as their first worker opened it.

    A worker with another file does not start. To change the file, stop all workers and run this
    command with --reset.
    """
    app = require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        node = broker_node(client, layout) if client else None
        if client and reset:
            reset_broker(client, layout)
    if node is None:
        print_message(f"hint: no worker of app {app!r} has registered with a broker file")
    elif reset:
        print_message("this file was forgotten; the next worker that registers decides")
    items = [] if node is None else [{"address": node.address, "host": node.host, "id": node.id}]
    emit("qdo.broker/1", items, form, {name: name.upper() for name in ("address", "host", "id")})
