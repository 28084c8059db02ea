"""The commands of `qdo limits`: list, set and delete limits of the whole fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import from_coordinator, open_coordinator
from qdo.cli.options import COORDINATOR, with_output
from qdo.cli.output import emit, print_message, values_text
from qdo.errors import UsageError
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.limits import (
    LimitWish,
    delete_limit,
    find_limit,
    limit_terms,
    list_limits,
    plan_limit,
    set_limit,
)
from qdo.ops.items import limit_item
from qdo.settings.settings import Settings
from qdo.text import one_line

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
    WAITING is the number of permits that processes could use beyond their shares. Processes hand
    out permits from memory, so the coordinator does not know how many are in use at any moment.
    """


@limits.command("list")
@with_output(*COORDINATOR)
def list_(form: str, settings: Settings) -> None:
    """List the limits of an app, and the shares that its processes hold."""
    nodes = from_coordinator(settings, list_limits, {})
    if not nodes:
        print_message("hint: the app has no limits yet; see `qdo limits set --help`")
    items = [limit_item(name, node) for name, node in nodes.items()]

    def cells(item: Mapping[str, Any]) -> dict[str, Any]:
        node = nodes[item["limit"]]
        holders = (f"{one_line(each.worker)} {each.held}/{each.wants}" for each in node.permits)
        declared = "declared by the app" if node.declared else ""
        return {
            "holders": ", ".join(holders),
            "reason": node.fault or one_line(node.reason) or declared,
            "rate": item["rate"] if node.rate is None else f"{item['rate']}, burst {node.burst}",
        }

    emit("qdo.limits/1", items, form, _COLUMNS, cells=cells)


@limits.command("set")
@click.argument("name")
@click.option("--max", "most", metavar="N", help="Permits in all processes; 0 stops, none removes.")
@click.option("--rate", metavar="RATE", help="Starts in all processes, such as 50/s; or none.")
@click.option(
    "--burst",
    metavar="N",
    help="Starts in any window of burst / rate; by default those of a second, at least 1.",
)
@changing(*COORDINATOR)
def set_(
    name: str,
    most: str | None,
    rate: str | None,
    burst: str | None,
    consent: Consent,
    settings: Settings,
) -> None:
    """Create or change a limit; options that are not given change nothing.

    `qdo limits list` shows the reason, too.
    """
    source = click.get_current_context().get_parameter_source("reason")
    reason = consent.reason if source is ParameterSource.COMMANDLINE else None
    if most is rate is burst is reason is None:
        raise UsageError(reason="give --max, --rate, --burst or --reason, such as --max 10")
    wish = LimitWish(most, rate, burst, reason)
    with open_coordinator(settings, create=not consent.dry_run) as (client, layout):
        before, after = plan_limit(client, layout, name, wish)
        effect = _effect(name, before, after)
        if consent.given(f"set limit {name!r}", effect.show, asks=False) and client is not None:
            after = set_limit(client, layout, name, wish)
            _effect(name, before, after).show(consent.form, executed=True)
            if after.max == 0:
                free = (before and before.max) or "N"
                print_message(
                    f"hint: jobs with limit {name!r} do not start; their messages wait, and use no"
                    f" attempt, until `qdo limits set {name} --max {free}`"
                )


@limits.command()
@click.argument("name")
@changing(*COORDINATOR)
def delete(name: str, consent: Consent, settings: Settings) -> None:
    """Delete a limit; the queues of jobs that name it wait."""
    with open_coordinator(settings) as (client, layout):
        before = find_limit(client, layout, name)
        effect = _effect(name, before, None)
        if consent.given(f"delete limit {name!r}", effect.show, asks=False) and client is not None:
            delete_limit(client, layout, name, consent.reason)
            effect.show(consent.form, executed=True)


def _effect(name: str, before: LimitNode | None, after: LimitNode | None) -> Effect:
    item = {
        "limit": name,
        "before": None if before is None else limit_terms(before),
        "after": None if after is None else limit_terms(after),
    }
    return Effect("qdo.limits-change/1", ("limit", "before", "after"), [item], _change_cells)


def _change_cells(item: Mapping[str, Any]) -> dict[str, str]:
    return {"before": values_text(item["before"]), "after": values_text(item["after"])}
