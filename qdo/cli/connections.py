"""Opens the coordinator and the broker of an app for a command.

Functions import the modules of coordinator and broker late, because --help and usage errors do not
need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from qdo.cli.options import code_hint, is_code_known, require_app
from qdo.cli.output import print_message
from qdo.errors import NotFoundError, QdoError
from qdo.settings.settings import Settings
from qdo.text import did_you_mean, join_some

if TYPE_CHECKING:
    from qdo.brokers.base import Broker
    from qdo.connections.opened import Connections
    from qdo.coordination.client import Client
    from qdo.coordination.znodes.layout import Layout
    from qdo.fleet.audit_entries import Values
    from qdo.ops.fleet import Fleet

_Result = TypeVar("_Result")
_NOTHING_THERE = {
    "coordinator": "no worker has used this coordinator",
    "broker": "nothing was sent to this broker",
}


@contextmanager
def open_connections(
    settings: Settings, *, broker: bool = True, coordinator: bool = True, create: bool = False
) -> Iterator[Connections]:
    """Open coordinator and broker with `connections_of`. Print a hint if a file is missing."""
    from qdo.connections.opened import connections_of
    from qdo.coordination.bulk_reads import exists_later

    def hint(name: str, path: str) -> None:
        where = f"{_NOTHING_THERE[name]}{code_hint(settings, name)}"
        print_message(f"hint: {path} does not exist yet: {where}")

    with connections_of(
        settings, hint, broker=broker, coordinator=coordinator, create=create
    ) as opened:
        if opened.client is None or not settings.app or is_code_known(settings):
            yield opened
            return
        # Wait for the answer at the end, so that the hint does not delay the command.
        is_known = exists_later(opened.client, opened.layout.root)
        try:
            yield opened
        finally:
            with suppress(QdoError):
                if not is_known():
                    _note_unknown(settings, opened.client, opened.broker)


def _note_unknown(settings: Settings, client: Client, broker: Broker | None) -> None:
    from qdo.coordination.bulk_reads import names_below

    if broker is not None and broker.catalog.names():
        return
    # The command itself may have created this node.
    others = [name for name in names_below(client, settings.namespace) if name != settings.app]
    if others:
        more = did_you_mean(settings.app, others) or f"; others: {join_some(others)}"
        where = f"namespace {settings.namespace}{more}"
        _print_once(f"hint: no process has used app {settings.app!r} in {where}")


@cache
def _print_once(text: str) -> None:
    print_message(text)  # only once per process, because some commands read repeatedly


def note_in_action_log(
    settings: Settings, command: str, target: str, before: Values, after: Values, reason: str
) -> None:
    """Write an entry to the action log for a change in the broker.

    Print the reason if the write fails.
    """
    from qdo.connections.opened import noted_in_action_log
    from qdo.fleet.audit import AuditTrail

    def trail(client: Client, layout: Layout) -> AuditTrail:
        return AuditTrail(client, layout, command, reason)

    fault = noted_in_action_log(settings, trail, target, before, after)
    if fault is not None:
        print_message(f"hint: this change has no entry in the action log: {fault}")


@contextmanager
def open_coordinator(
    settings: Settings, create: bool = False
) -> Iterator[tuple[Client | None, Layout]]:
    require_app(settings)
    with open_connections(settings, broker=False, create=create) as connections:
        yield connections.client, connections.layout


def from_coordinator(
    settings: Settings, read: Callable[[Client, Layout], _Result], empty: Any
) -> _Result:
    """Return the result of a function, or `empty` if the coordinator's file does not exist yet."""
    with open_coordinator(settings) as (client, layout):
        return empty if client is None else read(client, layout)


@contextmanager
def open_for_queue(
    settings: Settings,
    queue: str,
    check: Callable[[Broker], None] = lambda broker: None,
    create: bool = False,
) -> Iterator[Fleet]:
    """Open coordinator and broker for a command about a queue, or raise NotFoundError.

    :param check: a function that raises an error if the broker does not support the command.
    :param create: create a missing coordinator file, because the command writes.
    """
    require_app(settings)
    with open_connections(settings, create=create) as connections:
        fleet = connections.known_fleet()
        if fleet is None:
            raise NotFoundError(what="queue", name=queue)
        check(fleet.broker)
        yield fleet
