"""`qdo acl`: the rights on the znodes of an app."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import TextIO

import click

from qdo.cli.changing import Consent, changing
from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, print_message
from qdo.coordination.znodes.layout import Layout
from qdo.errors import PartialFailureError, SettingsError
from qdo.fleet.audit import AuditTrail
from qdo.ops.acl import AclDifference, acl_differences, apply_acls
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.settings import Settings
from qdo.text import join_some, pluralize

_OPTIONS = ("app", "coordinator", "namespace", "connect_seconds")
_COLUMNS = {"path": "NODE", "found": "FOUND", "expected": "EXPECTED"}
DIFFERENT = 1
"""Exit code of `qdo acl check` if the rights on a node differ."""


@click.group()
def acl() -> None:
    """Check and correct the rights on the znodes of an app; the settings acl* define them."""


@acl.command()
@with_settings(*_OPTIONS)
@output_option
def check(form: str, settings: Settings) -> int:
    """List the nodes whose rights differ from the settings; exit code 1 if there are any."""
    require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client = connections.client
        differences = acl_differences(client, connections.layout) if client else []
    _show(differences, form)
    if not differences:
        print_message("every node has the rights of the settings")
        return 0
    verb = "differs" if len(differences) == 1 else "differ"
    print_message(
        f"{pluralize(len(differences), 'node')} {verb} from the settings; run `qdo acl apply`"
    )
    return DIFFERENT


@acl.command()
@changing
@with_settings(*_OPTIONS)
@output_option
def apply(consent: Consent, form: str, settings: Settings) -> None:
    """Give every node the rights of the settings; list the nodes that differed.

    This needs an account with all rights on these nodes.
    """
    require_app(settings)
    with open_connections(settings, broker=False) as connections:
        client = connections.client
        differences = acl_differences(client, connections.layout) if client else []
        what = f"correct the rights on {pluralize(len(differences), 'node')}"
        asks = len(differences) > 1
        if not consent.given(what, partial(_show_applied, differences, None), form, asks=asks):
            return
        refused = apply_acls(client, differences) if client else {}
        if client is not None and len(differences) > len(refused):
            trail = AuditTrail(client, connections.layout, "acl apply", consent.reason)
            _log(trail, differences, refused)
    _show_applied(differences, refused, form)
    if refused:
        raise PartialFailureError(
            done=len(differences) - len(refused),
            total=len(differences),
            what="nodes have the rights of the settings now",
            rest=join_some([f"{path} ({why})" for path, why in refused.items()]),
        )
    print_message(f"corrected {pluralize(len(differences), 'node')}")


@acl.command()
@with_settings("coordinator", import_app=False)
def account(settings: Settings) -> None:
    """Print the account of the settings as acl_workers and its siblings need it."""
    found = coordinator_access(settings, Layout("")).account
    if found is None:
        raise SettingsError(name="coordinator_auth", reason="set it to digest:NAME or sasl:NAME")
    click.echo(f"{found.identity.scheme}:{found.identity.id}")


def _log(audit: AuditTrail, differences: Sequence[AclDifference], refused: Collection[str]) -> None:
    """Write the entry in the action log: rights cannot be changed in a transaction."""
    before = {"differing": len(differences)}
    fault = audit.note(differences[-1].path, before, {"differing": len(refused)})
    if fault is not None:
        print_message(f"hint: this change has no entry in the action log: {fault}")


def _show(differences: Sequence[AclDifference], form: str) -> None:
    emit("qdo.acl/1", map(dataclasses.asdict, differences), form, _COLUMNS)


def _show_applied(
    differences: Sequence[AclDifference],
    refused: Collection[str] | None,
    form: str,
    out: TextIO | None = None,
) -> None:
    """Show corrections.

    :param refused: the nodes that were not corrected; None: all of them, so far.
    """
    items = [
        {
            **dataclasses.asdict(each),
            "executed": refused is not None and each.path not in refused,
        }
        for each in differences
    ]
    emit("qdo.acl/1", items, form, _COLUMNS, out)
