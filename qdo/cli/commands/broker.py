"""`qdo broker`: the broker file that the workers share, and the schema in a database."""

from __future__ import annotations

import click

from qdo.brokers.registry import schema_of
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, reason_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.ops.broker import broker_node, reset_broker
from qdo.settings.settings import Settings

KINDS = ("sender", "worker", "onlooker")


@click.group()
def broker() -> None:
    """Show the broker file that the workers share; prepare a database."""


@broker.command()
@click.option("--reset", is_flag=True, help="Forget the file: the next worker decides.")
@reason_option
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def file(reset: bool, reason: str, form: str, settings: Settings) -> None:
    """Show the broker file that all workers of an app must use, as their first worker opened it.

    A worker with another file does not start. To change the file, stop all workers and run this
    command with --reset.
    """
    app = require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        node = broker_node(client, layout) if client else None
        if client and reset:
            reset_broker(client, layout, reason)
    if node is None:
        print_message(f"hint: no worker of app {app!r} has registered with a broker file")
    elif reset:
        print_message("this file was forgotten; the next worker that registers decides")
    items = [] if node is None else [{"address": node.address, "host": node.host, "id": node.id}]
    emit("qdo.broker/1", items, form, {name: name.upper() for name in ("address", "host", "id")})


@broker.command()
@click.option("--print", "show", is_flag=True, help="Print the SQL statements; change nothing.")
@click.option(
    "--partition-seconds",
    type=click.IntRange(1, 31 * 86400),
    default=3600,
    metavar="SECONDS",
    help="Length of a partition, 3600 by default. Only for a new schema.",
)
@with_settings("broker")
def init(show: bool, partition_seconds: int, settings: Settings) -> None:
    """Create or upgrade the schema of a PostgreSQL broker; a schema that is current stays."""
    schema = schema_of(settings.broker)
    if show:
        click.echo(schema.script(settings.broker, partition_seconds), nl=False)
    elif schema.create(settings.broker, partition_seconds):
        print_message("created the schema")
    else:
        print_message("the schema is current; nothing to do")


@broker.command()
@click.argument("role")
@click.option(
    "--for", "kind", type=click.Choice(KINDS), required=True, help="What the role is to do."
)
@with_settings("broker")
def grants(role: str, kind: str, settings: Settings) -> None:
    """Print the SQL statements that give a role of PostgreSQL the rights that it needs.

    Run them as the owner of the schema, for instance with psql.
    """
    for statement in schema_of(settings.broker).grants(settings.broker, role, kind):
        click.echo(f"{statement};")
