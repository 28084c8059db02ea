"""`qdo limits`: list, set and delete limits of the whole fleet."""

from __future__ import annotations

from typing import Any

import click

from qdo.cli.connections import open_coordinator
from qdo.cli.framework import output_option, reason_option, with_settings
from qdo.cli.output import emit, print_message
from qdo.errors import UsageError
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.limits import LimitWish, delete_limit, list_limits, set_limit
from qdo.fleet_errors import LimitNotFoundError
from qdo.ops.items import limit_item
from qdo.settings.settings import Settings
from qdo.text import one_line

_SETTINGS = ("app", "coordinator", "namespace", "connect_seconds")
_COLUMNS = ("limit", "max", "held", "waiting", "rate", "holders", "reason")


@click.group()
def limits() -> None:
    """Manage limits: how many jobs of all processes run at once, and how often they start.

    \b
    qdo limits list --app shop:app
    qdo limits set --app shop:app crm --max 10 --rate 50/s
    qdo limits set --app shop:app crm --max 0 --reason "CRM is down"
    qdo limits delete --app shop:app crm

    NAME is in `limits` of the app's jobs. Queues whose job names a limit that does not exist wait.
    """


@limits.command("list")
@with_settings(*_SETTINGS)
@output_option
def list_(form: str, settings: Settings) -> None:
    """List the limits of an app, and the shares that its processes hold."""
    with open_coordinator(settings) as (client, layout):
        found = list_limits(client, layout) if client else {}
    if not found:
        print_message("hint: the app has no limits yet; see `qdo limits set --help`")
    items = [_item(name, node, form) for name, node in found.items()]
    emit("qdo.limits/1", items, form, {name: name.upper() for name in _COLUMNS})


def _item(name: str, node: LimitNode, form: str) -> dict[str, Any]:
    item = limit_item(name, node)
    if form == "table":
        holders = (f"{one_line(each.worker)} {each.held}/{each.wants}" for each in node.permits)
        item["holders"] = ", ".join(holders)
        item["reason"] = node.fault or one_line(node.reason)
        if node.rate is not None:
            item["rate"] = f"{item['rate']}, burst {node.burst}"
    return item


@limits.command("set")
@click.argument("name")
@click.option("--max", "most", metavar="N", help="Permits in all processes; 0 stops, none removes.")
@click.option("--rate", metavar="RATE", help="Starts in all processes, such as 50/s; or none.")
@click.option("--burst", metavar="N", help="Starts above the rate; by default those of a second.")
@click.option("--reason", metavar="TEXT", help="Why; `qdo limits list` shows it.")
@with_settings(*_SETTINGS)
def set_(
    name: str,
    most: str | None,
    rate: str | None,
    burst: str | None,
    reason: str | None,
    settings: Settings,
) -> None:
    """Create or change a limit; what is not given stays as it is."""
    if most is rate is burst is reason is None:
        raise UsageError(reason="give --max, --rate, --burst or --reason, such as --max 10")
    with open_coordinator(settings, create=True) as (client, layout):
        if client is not None:
            set_limit(client, layout, name, LimitWish(most, rate, burst, reason))


@limits.command()
@click.argument("name")
@reason_option
@with_settings(*_SETTINGS)
def delete(name: str, reason: str, settings: Settings) -> None:
    """Delete a limit; the queues of jobs that name it wait."""
    with open_coordinator(settings) as (client, layout):
        if client is None:
            raise LimitNotFoundError(name=name, hint="")
        delete_limit(client, layout, name, reason)
