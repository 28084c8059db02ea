"""Opening what a command reads: coordinator and broker of the app in the settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from qdo.brokers import open_broker
from qdo.brokers.base import Broker
from qdo.cli.output import say
from qdo.coordination.client import Address, Client, connect
from qdo.coordination.layout import Layout
from qdo.ringing import ring_for
from qdo.settings import Settings


@dataclass(frozen=True, slots=True)
class Reach:
    """What a command can reach.

    :ivar client: None where the coordinator is a file that does not exist yet.
    :ivar broker: None where the broker is a file that does not exist yet.
    """

    client: Client | None
    broker: Broker | None
    layout: Layout


@contextmanager
def reached(
    settings: Settings, *, broker: bool = True, coordinator: bool = True
) -> Iterator[Reach]:
    """Open coordinator and broker for reading.

    Looking must not make files: what does not exist yet is None, and said on stderr.

    :raises UnreachableError: one of them exists and cannot be reached.
    """
    layout = Layout.of(settings.app or "app", settings.namespace)
    with ExitStack() as stack:
        client = _client(settings, stack) if coordinator else None
        yield Reach(client, _broker(settings, stack) if broker else None, layout)


def _client(settings: Settings, stack: ExitStack) -> Client | None:
    # kazoo logs every failed attempt, which would end up on stderr: one line says it all.
    logging.getLogger().addHandler(logging.NullHandler())
    path = Address.parse(settings.coordinator).path
    if path is not None and not os.path.exists(path):
        say(f"hint: there is no {path} yet: no worker has run with this coordinator")
        return None
    client = connect(
        settings.coordinator,
        handler="threading",
        session_timeout_seconds=settings.session_timeout_seconds,
    )
    client.open(settings.connect_seconds)
    stack.callback(client.close)
    stack.callback(client.stop)
    return client


def _broker(settings: Settings, stack: ExitStack) -> Broker | None:
    path = settings.broker.removeprefix("sqlite:")
    if path != settings.broker and not os.path.exists(path):
        say(f"hint: there is no {path} yet: nothing was sent with this broker")
        return None
    broker = open_broker(settings.broker, settings.app)
    ringer = ring_for(broker, settings, settings.app)
    if ringer is not None:
        stack.callback(ringer.close)
    stack.callback(broker.close)
    return broker
