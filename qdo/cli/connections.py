"""Open the coordinator and the broker of the app in the settings, for a command."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.cli.app_settings import code_hint
from qdo.cli.framework import require_app
from qdo.cli.output import print_message
from qdo.coordination.client import Address, Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import DatabaseError, QdoError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.protocol.audit_entries import Values
from qdo.sending.doorbell import open_broker_with_doorbell
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of a command.

    :ivar client: None if the coordinator is a file that does not exist yet.
    :ivar broker: None if the broker is a file that does not exist yet.
    """

    client: Client | None
    broker: Broker | None
    layout: Layout


@contextmanager
def open_connections(
    settings: Settings, *, broker: bool = True, coordinator: bool = True, create: bool = False
) -> Iterator[Connections]:
    """Open coordinator and broker for reading.

    Reading must not create files: a file that does not exist yet is None, with a hint on stderr.

    :param create: create the file of the coordinator, in order to write to it.
    :raises UnreachableError: one of them exists and cannot be reached.
    """
    layout = Layout.of(settings.app or "app", settings.namespace)
    with ExitStack() as stack:
        client = _client(settings, layout, stack, create) if coordinator else None
        yield Connections(client, _broker(settings, stack) if broker else None, layout)


def note_in_action_log(
    settings: Settings, command: str, target: str, before: Values, after: Values, reason: str
) -> None:
    """Write an entry for a change that was made in the broker; if that fails, print why.

    Nothing happens without a coordinator: a file that no worker has created.
    """
    path = Address.parse(settings.coordinator).path
    if path is not None and not file_exists(path):
        return
    try:
        with open_connections(settings, broker=False) as connections:
            client = connections.client
            if client is None:
                return
            trail = AuditTrail(client, connections.layout, command, reason)
            fault = trail.note(target, before, after)
    except QdoError as error:
        fault = str(error)
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


def _client(settings: Settings, layout: Layout, stack: ExitStack, create: bool) -> Client | None:
    # kazoo logs every failed attempt to stderr; the one line of our error is enough.
    logging.getLogger().addHandler(logging.NullHandler())
    path = Address.parse(settings.coordinator).path
    if path is not None and not create and not file_exists(path):
        print_message(
            f"hint: {path} does not exist yet: no worker has used this coordinator"
            f"{code_hint(settings, 'coordinator')}"
        )
        return None
    client = connect(
        settings.coordinator,
        access=coordinator_access(settings, layout),
        handler="threading",
        session_timeout_seconds=settings.session_timeout_seconds,
        may_look_on=True,
    )
    client.open(settings.connect_seconds)
    stack.callback(client.close)
    stack.callback(client.stop)
    return client


def _broker(settings: Settings, stack: ExitStack) -> Broker | None:
    path = settings.broker.removeprefix("sqlite:")
    if path != settings.broker and not file_exists(path):
        print_message(
            f"hint: {path} does not exist yet: nothing was sent to this broker"
            f"{code_hint(settings, 'broker')}"
        )
        return None
    return stack.enter_context(open_broker_with_doorbell(settings, settings.app))


def file_exists(path: str) -> bool:
    """Return whether a file exists.

    :raises DatabaseError: this user may not look; "nothing there" would be a false answer.
    """
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DatabaseError(path=path, reason=error.strerror or str(error)) from error
    return True
