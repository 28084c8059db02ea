"""The locks of an app in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdo.sending.coordinator import ProcessConnection, open_client
from qdo.settings.hosts import describe_process, writer_shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from qdo.fleet.locks import CoordinatorLocks, LockService
    from qdo.settings.settings import Settings


def lock_connection(
    app: str, settings: Callable[[], Settings]
) -> ProcessConnection[CoordinatorLocks, LockService]:
    """Return the connection for the locks of an app, opened by the first lock."""
    return ProcessConnection(app, lambda: open_locks(app, settings()))


def open_locks(app: str, settings: Settings) -> CoordinatorLocks:
    """Return a new connection for locks and sections of an app.

    :raises CoordinatorUnreachableError: the coordinator does not respond.
    """
    from qdo.coordination.side.leased import LeasedConnection
    from qdo.coordination.transactions import make_folder
    from qdo.coordination.znodes.layout import clients_of
    from qdo.fleet.locks import CoordinatorLocks

    client, layout = open_client(settings, app)
    make_folder(client, clients_of(layout.root))
    connection = LeasedConnection(client, layout, describe_process(settings))
    return CoordinatorLocks(connection, layout, writer_shown(settings))
