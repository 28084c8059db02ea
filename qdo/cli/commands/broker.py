"""`qdo broker`: the broker file that the workers share, and the schema in a database."""

from __future__ import annotations

from functools import partial
from typing import TextIO

import click

from qdo.brokers.registry import schema_of
from qdo.cli.changing import Consent, changing, changing_unlogged
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.coordination.session_setup import BrokerNode
from qdo.ops.broker import broker_node, check_reset, reset_broker
from qdo.settings.settings import Settings
from qdo.text import hide_credentials

KINDS = ("sender", "worker", "onlooker")


@click.group()
def broker() -> None:
    """Show the broker file that the workers share; prepare a database."""


@broker.command()
@click.option("--reset", is_flag=True, help="Forget the file: the next worker decides.")
@changing
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def file(reset: bool, consent: Consent, form: str, settings: Settings) -> None:
    """Show the broker file that all workers of an app must use, as their first worker opened it.

    A worker with another file does not start. To change the file, stop all workers and run this
    command with --reset.
    """
    app = require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client, layout = connections.client, connections.layout
        node = broker_node(client, layout) if client else None
        if client is None or node is None:
            print_message(f"hint: no worker of app {app!r} has registered with a broker file")
            emit("qdo.broker/1", [], form, {})
            return
        if not reset:
            _show(node, None, form)
            return
        check_reset(client, layout)
        if consent.given(
            f"forget the broker file of app {app!r}", partial(_show, node, False), form
        ):
            reset_broker(client, layout, consent.reason)
            print_message("this file was forgotten; the next worker that registers decides")
            _show(node, True, form)


def _show(node: BrokerNode, executed: bool | None, form: str, out: TextIO | None = None) -> None:
    item = {"address": node.address, "host": node.host, "id": node.id}
    columns = {name: name.upper() for name in item}
    done = {} if executed is None else {"executed": executed}
    emit("qdo.broker/1", [{**item, **done}], form, columns, out)


@broker.command()
@click.option("--print", "printing", is_flag=True, help="Print the SQL statements; change nothing.")
@click.option(
    "--partition-seconds",
    type=click.IntRange(1, 31 * 86400),
    default=3600,
    metavar="SECONDS",
    help="Length of a partition, 3600 by default. Only for a new schema.",
)
@changing_unlogged
@with_settings("broker")
@output_option
def init(
    printing: bool, partition_seconds: int, consent: Consent, form: str, settings: Settings
) -> None:
    """Create or upgrade the schema of a PostgreSQL broker; a schema that is current stays."""
    schema = schema_of(settings.broker)
    if printing:
        click.echo(schema.script(settings.broker, partition_seconds), nl=False)
        return
    address = hide_credentials(settings.broker)
    show = partial(_show_schema, address, schema.is_missing(settings.broker), False)
    if consent.given("create the schema", show, form, asks=False):
        created = schema.create(settings.broker, partition_seconds)
        if form != "table":
            _show_schema(address, created, created, form)
        print_message("created the schema" if created else "the schema is current; nothing to do")


def _show_schema(
    address: str, missing: bool, executed: bool, form: str, out: TextIO | None = None
) -> None:
    item = {"broker": address, "schema": "create" if missing else "current", "executed": executed}
    emit("qdo.broker-init/1", [item], form, {"broker": "BROKER", "schema": "SCHEMA"}, out)


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
