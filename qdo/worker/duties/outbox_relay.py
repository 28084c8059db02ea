"""The duty "outbox" of the fleet's leader sends the messages of SQL outboxes.

Database drivers block their thread. For example, SQLite's driver blocks while another process has
the lock. A relay therefore runs in gevent's pool of native threads, and the event loop continues to
serve the queues.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import gevent

from qdo.app import OutboxTable
from qdo.brokers.base import LASTING_DEDUP_SECONDS, Broker
from qdo.coordination.member import Member
from qdo.errors import UnsupportedError
from qdo.system.clock import clock
from qdo.text import describe, pluralize
from qdo.worker.duties.duty import CurrentMember
from qdo.worker.duties.leading import LeaderDuty

_log = logging.getLogger(__name__)

# Seconds between two looks for new rows.
POLL_SECONDS = 0.5
# Pause after an error of the database or the broker, in seconds.
RETRY_SECONDS = 5.0
# Seconds between two counts of waiting and refused rows.
COUNT_SECONDS = 10.0


class Relay(LeaderDuty):
    """Relays the messages of an app's outboxes to the broker.

    :ivar quiet: whether every outbox was empty at the last look, or another worker leads.
    :raises UnsupportedError: the broker does not deduplicate for long enough.
    """

    name = "outbox"

    def __init__(
        self, outboxes: Sequence[OutboxTable], broker: Broker, current: CurrentMember | None = None
    ) -> None:
        if not broker.capabilities.lasting_dedup:
            raise UnsupportedError(
                broker="this broker",
                what="relay an outbox: it does not deduplicate for "
                f"{LASTING_DEDUP_SECONDS / 86_400:g} days",
                remedy="send with App.send after the commit",
            )
        super().__init__(current)
        self._outboxes = outboxes
        self._broker = broker
        self.quiet = False
        self._count_at = 0.0
        # The running relays, by outbox number.
        self._running: dict[int, Any] = {}
        # The results of `OutboxTable.counts` by table; empty while another worker leads.
        self.counts: dict[str, tuple[int, int, int]] = {}

    def follow(self, member: Member | None) -> None:
        self.quiet = member is not None
        self._count_at = 0.0
        self.counts = {}

    def lead(self, member: Member) -> float:
        """Relay all waiting rows; return the seconds until the next step."""
        running = self._running
        counts = clock() >= self._count_at
        for number, outbox in enumerate(self._outboxes):
            if number not in running:
                thread_pool = gevent.get_hub().threadpool
                running[number] = thread_pool.spawn(self._relay, outbox, counts)
        # With a timeout, an unresponsive database delays only its own rows.
        gevent.wait([*running.values()], timeout=POLL_SECONDS)
        ended = [number for number, relay in running.items() if relay.ready()]
        results = [running.pop(number).get() for number in ended]
        if counts:
            self._count_at = clock() + COUNT_SECONDS
        member.leader.waiting_rows = {table: each[0] for table, each in self.counts.items()}
        member.leader.refused_rows = {table: each[1] for table, each in self.counts.items()}
        moved = sum(count for count in results if count is not None)
        self.quiet = not (moved or None in results or running)
        if moved:
            _log.debug("relayed %s from the outbox", pluralize(moved, "message"))
            return 0.0
        return RETRY_SECONDS if None in results else POLL_SECONDS

    def _relay(self, outbox: OutboxTable, counts: bool) -> int | None:
        """Relay the rows of one outbox; return the number of sent messages, None after an error."""
        table = str(outbox.table.name)
        try:
            moved = outbox.relay(self._broker)
        except Exception as error:  # noqa: BLE001 - databases raise what their drivers raise
            moved = None
            _log.warning(
                "cannot relay the messages in %s, retrying in %g s: %s",
                table,
                RETRY_SECONDS,
                describe(error),
            )
        if counts:
            try:
                self.counts[table] = outbox.counts(self.counts.get(table, (0, 0, 0))[2])
            except Exception as error:  # noqa: BLE001 - databases raise what their drivers raise
                self.counts.pop(table, None)
                _log.debug("cannot count the messages in %s: %s", table, describe(error))
        return moved
