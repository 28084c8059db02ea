"""The progress of the demo, as the display shows it."""

from __future__ import annotations

import time
from collections import Counter

from qdo.demo.display import Picture, TableRow
from qdo.demo.fleet import WatchedFleet
from qdo.demo.ledger import LedgerReader

_RATE_SECONDS = 2.0


class DemoProgress:
    """Follows the fleet and the ledger.

    :ivar messages: number of messages by process id.
    """

    def __init__(self, fleet: WatchedFleet, ledger: LedgerReader, total: int) -> None:
        self.messages: Counter[int] = Counter()
        self._fleet = fleet
        self._ledger = ledger
        self._total = total
        self._began = time.monotonic()
        self._rates: list[tuple[float, int]] = []

    def read(self) -> None:
        """Read new lines of the ledger."""
        self.messages.update(record.pid for record in self._ledger.read())

    def look(self) -> Picture:
        """Read new lines of the ledger; return the present state."""
        self.read()
        now = time.monotonic()
        counts = self._fleet.counts()
        rows = tuple(
            TableRow(
                worker,
                pid,
                counts.get(worker, 0),
                self.messages[pid],
                "running" if worker in counts else "killed",
            )
            for worker, pid in sorted(self._fleet.pids().items())
        )
        done = self._ledger.distinct
        return Picture(
            now - self._began, done, self._total, self._rate(now, done), self._fleet.moves, rows
        )

    def _rate(self, now: float, done: int) -> float:
        self._rates = [each for each in self._rates if each[0] > now - _RATE_SECONDS]
        self._rates.append((now, done))
        earlier, before = self._rates[0]
        return (done - before) / (now - earlier) if now > earlier else 0.0
