"""The coordinator and the broker of an app, opened for commands and the dashboard."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.connections.broker import open_broker_with_doorbell
from qdo.coordination.bulk_reads import read_permitted_children
from qdo.coordination.client import Address, Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import BrokerMissingError, DatabaseError, QdoError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.audit_entries import Values
from qdo.ops.broker import broker_node
from qdo.ops.fleet import Fleet
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.settings import Settings
from qdo.system.files import sqlite_path
from qdo.text import hide_credentials

# A function of the name of a setting and the path of its missing file.
OnMissing = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Connections:
    """The open connections to coordinator and broker."""

    # The coordinator's client; None if the coordinator is a file that does not exist yet.
    client: Client | None
    # The broker; None if it is a file that does not exist yet.
    broker: Broker | None
    layout: Layout
    # The error for the broker's missing file; None if no sender has sent a message yet.
    broker_fault: BrokerMissingError | None = None

    def known_broker(self) -> Broker | None:
        """Return the broker, or None before the first send; raise an error if its file is gone."""
        if self.broker_fault is not None:
            raise self.broker_fault
        return self.broker

    def known_fleet(self) -> Fleet | None:
        """Return coordinator and broker; see `known_broker`."""
        broker = self.known_broker()
        return None if broker is None else Fleet(self.client, self.layout, broker)


@contextmanager
def connections_of(
    settings: Settings,
    on_missing: OnMissing = lambda name, path: None,
    *,
    broker: bool = True,
    coordinator: bool = True,
    create: bool = False,
) -> Iterator[Connections]:
    """Open coordinator and broker for reading, without creating files.

    :param create: whether to create the file of the coordinator, for a later write.
    :raises UnreachableError: the coordinator or the broker does not respond.
    """
    layout = Layout.of(settings.app or "app", settings.namespace)
    with ExitStack() as stack:
        client = _client(settings, layout, stack, on_missing, create) if coordinator else None
        path = sqlite_path(settings.broker)
        if not broker or path is None or file_exists(path):
            found = _broker(settings, stack) if broker else None
            yield Connections(client, found, layout)
            return
        if not coordinator:
            client = _client(settings, layout, stack, lambda name, path: None, create=False)
        fault = _broker_fault(client, layout, path)
        if fault is None:
            on_missing("broker", path)
        yield Connections(client, None, layout, fault)


def noted_in_action_log(
    settings: Settings,
    trail: Callable[[Client, Layout], AuditTrail],
    target: str,
    before: Values,
    after: Values,
) -> str | None:
    """Log a change in the broker in the action log; return the reason if this fails.

    If no worker has created the coordinator's file, do nothing.
    """
    path = Address.parse(settings.coordinator).path
    if path is not None and not file_exists(path):
        return None
    try:
        with connections_of(settings, broker=False) as opened:
            if opened.client is None:
                return None
            return trail(opened.client, opened.layout).note(target, before, after)
    except QdoError as error:
        return str(error)


def _client(
    settings: Settings, layout: Layout, stack: ExitStack, on_missing: OnMissing, create: bool
) -> Client | None:
    # kazoo would log every failed attempt to stderr. qdo's error of one line is enough.
    logging.getLogger().addHandler(logging.NullHandler())
    path = Address.parse(settings.coordinator).path
    if path is not None and not create and not file_exists(path):
        on_missing("coordinator", path)
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


def _broker_fault(client: Client | None, layout: Layout, path: str) -> BrokerMissingError | None:
    """Return the error for a missing file; None if no worker has used a broker yet.

    If the missing file was in use, "no messages" and "no dead letters" would be wrong results.
    """
    node = None if client is None else broker_node(client, layout)
    if node is not None:
        why = f"the workers of the app use {hide_credentials(node.address)} on {node.host}"
    elif client is not None and read_permitted_children(client, [layout.queues]).get(layout.queues):
        why = "the app has queues"
    else:
        return None
    return BrokerMissingError(path=path, why=why)


def _broker(settings: Settings, stack: ExitStack) -> Broker:
    return stack.enter_context(open_broker_with_doorbell(settings, settings.app))


def file_exists(path: str) -> bool:
    """Return whether a file exists; raise DatabaseError if this user may not find out."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DatabaseError(path=path, reason=error.strerror or str(error)) from error
    return True
