"""The live settings of an app in a process that is not a worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdo.errors import CoordinatorUnreachableError
from qdo.sending.coordinator import ProcessConnection, open_client

if TYPE_CHECKING:
    from qdo.coordination.side.connection import SideConnection
    from qdo.settings.in_force import SettingsInForce
    from qdo.settings.live import LiveSettings
    from qdo.settings.settings import Settings


class LiveConnection:
    """The live settings over a connection of their own.

    :ivar pid: the process that opened it.
    """

    def __init__(self, side: SideConnection, live: LiveSettings) -> None:
        self.pid = os.getpid()
        self._side = side
        self._live = live

    @property
    def now(self) -> Settings:
        """The settings in force."""
        return self._live.in_force.now

    @property
    def over(self) -> bool:
        """False: without nodes of its own it survives the end of its session."""
        return False

    def close(self) -> None:
        """Close the connection, unless a parent process opened it."""
        self._side.close()


def live_connection(
    app: str, settings: Callable[[], Settings], code_origin: str
) -> ProcessConnection[LiveConnection, SettingsInForce]:
    """Return the connection for the live settings of an app, opened by their first use."""
    return ProcessConnection(app, lambda: _opened(app, settings(), code_origin))


def _opened(app: str, settings: Settings, code_origin: str) -> LiveConnection:
    """Open a connection, and wait for the live settings."""
    # Imported late: most senders need no coordinator.
    from qdo.coordination.side.connection import SideConnection
    from qdo.fleet.protocol.live_settings import SettingsWatch
    from qdo.settings.live import LiveSettings

    client, layout = open_client(settings, app)
    side = SideConnection(client)
    live = LiveSettings(settings, code_origin)
    watch = SettingsWatch(layout.fleet.settings, live)
    side.add(watch)
    if not side.wait(watch.when_read, settings.connect_seconds):
        side.close()
        reason = f"no answer within {settings.connect_seconds:g} s"
        raise CoordinatorUnreachableError(url=settings.coordinator, reason=reason)
    return LiveConnection(side, live)
