"""The relay of a testing kit: sends the rows of the app's outboxes, as the elected worker does."""

from __future__ import annotations

import logging

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.text import describe

_log = logging.getLogger(__name__)


class KitRelay:
    """Sends the messages of an app's outboxes to the broker of a kit.

    An app may be tested without the database of its outbox: errors are only logged, like those of
    a worker.
    """

    def __init__(self, app: App, broker: Broker) -> None:
        self._app = app
        self._broker = broker
        self._failed: set[str] = set()

    def relay(self) -> bool:
        """Send all rows that are due; return whether there were any."""
        moved = 0
        for outbox in self._app.outboxes:
            table = str(outbox.table.name)
            try:
                while count := outbox.relay(self._broker):
                    moved += count
                self._failed.discard(table)
            except Exception as error:  # noqa: BLE001 - databases raise what their drivers raise
                if table not in self._failed:
                    self._failed.add(table)
                    _log.warning("cannot relay the messages in %s: %s", table, describe(error))
        return moved > 0

    def next_due(self) -> float | None:
        """Return the Unix time at which the next delayed row is due, None without one."""
        working = [each for each in self._app.outboxes if str(each.table.name) not in self._failed]
        dues = [each.next_due() for each in working]
        return min((due for due in dues if due is not None), default=None)
