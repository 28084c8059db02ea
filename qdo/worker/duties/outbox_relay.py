"""The duty "outbox": sends the messages of SQL outboxes. Only the leader of the fleet does it.

Database drivers block their thread, for example SQLite's while another process has the lock. So a
relay runs in gevent's pool of native threads, and the event loop continues to serve the queues.
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

# How often the leader looks for new rows.
POLL_SECONDS = 0.5
# Pause after an error of the database or the broker.
RETRY_SECONDS = 5.0
# How often the leader counts waiting and refused rows.
COUNT_SECONDS = 10.0


class Relay(LeaderDuty):
    """Empties the outboxes of an app.

    :ivar quiet: whether the last look found every outbox empty, or another worker leads.
    :raises UnsupportedError: the broker does not deduplicate, or does so for too short a time.
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
        # The relays whose databases have not answered yet, by outbox number.
        self._running: dict[int, Any] = {}
        # The results of `OutboxTable.counts` by table, only while this worker leads.
        self.counts: dict[str, tuple[int, int, int]] = {}

    def follow(self, member: Member | None) -> None:
        self.quiet = member is not None
        self._count_at = 0.0
        self.counts = {}

    def lead(self, member: Member) -> float:
        """Relay all waiting rows."""
        running = self._running
        counts = clock() >= self._count_at
        for number, outbox in enumerate(self._outboxes):
            if number not in running:
                thread_pool = gevent.get_hub().threadpool
                running[number] = thread_pool.spawn(self._relay, outbox, counts)
        # An unresponsive database delays only its own rows.
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
        """Return the number of rows sent, None if sending failed."""
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
            except Exception as error:  # noqa: BLE001 - as above
                self.counts.pop(table, None)
                _log.debug("cannot count the messages in %s: %s", table, describe(error))
        return moved
