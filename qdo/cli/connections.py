"""Open the coordinator and the broker of the app in the settings, for a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qdo.cli.framework import code_hint, require_app
from qdo.cli.output import print_message
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.audit import AuditTrail
from qdo.fleet.audit_entries import Values
from qdo.sending.connections import Connections, connections_of, noted_in_action_log
from qdo.settings.settings import Settings

_NOTHING_THERE = {
    "coordinator": "no worker has used this coordinator",
    "broker": "nothing was sent to this broker",
}


@contextmanager
def open_connections(
    settings: Settings, *, broker: bool = True, coordinator: bool = True, create: bool = False
) -> Iterator[Connections]:
    """Open coordinator and broker as `connections_of` does, with a hint for a missing file."""

    def hint(name: str, path: str) -> None:
        where = f"{_NOTHING_THERE[name]}{code_hint(settings, name)}"
        print_message(f"hint: {path} does not exist yet: {where}")

    with connections_of(
        settings, hint, broker=broker, coordinator=coordinator, create=create
    ) as opened:
        yield opened


def note_in_action_log(
    settings: Settings, command: str, target: str, before: Values, after: Values, reason: str
) -> None:
    """Write an entry for a change that was made in the broker; if that fails, print why."""

    def trail(client: Client, layout: Layout) -> AuditTrail:
        return AuditTrail(client, layout, command, reason)

    fault = noted_in_action_log(settings, trail, target, before, after)
    if fault is not None:
        print_message(f"hint: this change has no entry in the action log: {fault}")


@contextmanager
def open_coordinator(
    settings: Settings, create: bool = False
) -> Iterator[tuple[Client | None, Layout]]:
    """Open the coordinator of an app; see `open_connections`."""
    require_app(settings)
    with open_connections(settings, broker=False, create=create) as connections:
        yield connections.client, connections.layout
