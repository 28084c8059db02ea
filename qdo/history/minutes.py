"""Totals of each queue and minute, and which of them the database does not have yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qdo.history.recorder import FAILED, FIRST_BUCKET, MAX_KEPT, SIZE, Counts

Key = tuple[str, int]
"""A queue, and the Unix time at which its minute begins."""

_NOTHING: tuple[float, ...] = (0.0,) * SIZE
IDLE_SECONDS = 600.0
"""A queue without attempts for this long is forgotten until its next one."""


def attempts_in(counts: Iterable[float]) -> int:
    """Return the number of attempts in the counts of a queue or a minute."""
    row = tuple(counts)
    return int(row[FAILED] + sum(row[FIRST_BUCKET:]))


@dataclass(slots=True)
class MinuteTotals:
    """The totals of one queue in one minute.

    :ivar stored: those that the database has confirmed.
    """

    counts: Counts = field(default_factory=lambda: [0.0] * SIZE)
    stored: tuple[float, ...] = _NOTHING


@dataclass(slots=True)
class _Seen:
    """What of the counts of a queue is in its minutes."""

    source: Counts
    counts: tuple[float, ...] = _NOTHING
    changed: float = 0.0


class Minutes:
    """The minutes that one process writes. For one thread.

    Rows hold totals: to write a row again changes nothing. Attempts belong to the minute in which
    `collect` first sees them.

    :ivar dropped: attempts of minutes for which there was no room.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._totals: dict[Key, MinuteTotals] = {}
        self._unstored: dict[Key, None] = {}
        self._seen: dict[str, _Seen] = {}
        self._removed: list[tuple[str, _Seen]] = []

    def __len__(self) -> int:
        return len(self._unstored)

    def collect(self, counts: dict[str, Counts], now: float) -> None:
        """Add what was counted since the last call; remove idle queues from `counts`.

        :param now: Unix time.
        """
        minute = int(now) // 60 * 60
        # Removed a second ago: the event loop may have held the list at that moment.
        removed, self._removed = self._removed, []
        for queue, seen in removed:
            self._take(queue, seen, minute, now)
        for queue, source in counts.copy().items():
            known = self._seen.get(queue)
            if known is None or known.source is not source:
                known = self._seen[queue] = _Seen(source, changed=now)
            self._take(queue, known, minute, now)
            if now - known.changed >= IDLE_SECONDS:
                del counts[queue], self._seen[queue]
                self._removed.append((queue, known))
        if removed or len(self._totals) > len(self._unstored):
            self._forget_stored(minute)

    def unstored(self) -> list[tuple[Key, tuple[float, ...]]]:
        """Return the rows to be written, oldest first."""
        return [(key, tuple(self._totals[key].counts)) for key in self._unstored]

    def confirm(self, rows: Iterable[tuple[Key, tuple[float, ...]]]) -> None:
        """Note that the database has stored these rows of `unstored`."""
        for key, counts in rows:
            totals = self._totals[key]
            totals.stored = counts
            if tuple(totals.counts) == counts:
                del self._unstored[key]

    def limit(self, most: int = MAX_KEPT) -> None:
        """Drop the newest rows above `most`, and count their attempts."""
        for key in list(self._unstored)[most:]:
            totals = self._totals[key]
            self.dropped += attempts_in(totals.counts) - attempts_in(totals.stored)
            totals.counts = list(totals.stored)
            del self._unstored[key]

    def _take(self, queue: str, seen: _Seen, minute: int, now: float) -> None:
        counts = tuple(seen.source)  # in one step: the event loop cannot count in between
        if counts == seen.counts:
            return
        key = queue, minute
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = MinuteTotals()
        totals.counts = [
            total + new - old
            for total, new, old in zip(totals.counts, counts, seen.counts, strict=True)
        ]
        self._unstored[key] = None
        seen.counts, seen.changed = counts, now

    def _forget_stored(self, minute: int) -> None:
        """Forget minutes that are over and stored; an unstored one may be stored in part."""
        over = [key for key in self._totals if key[1] != minute and key not in self._unstored]
        for key in over:
            del self._totals[key]
