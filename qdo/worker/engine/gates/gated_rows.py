"""Rows of jobs with limits: each is started with permits.

Asking for permits before each message would cost more than a short job. While nothing can change
between two messages, the rows of a turn come in one streak, straight from the fetched rows: one
grant is handed from message to message. Whatever may change what this process may start
interrupts the streak first: a queue that begins to wait, a cap that is lowered, a look at a rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, Protocol

from qdo.worker.engine.prefetch import Row, Rows

if TYPE_CHECKING:
    from qdo.fleet.protocol.pools import Pool, StartPool
    from qdo.worker.engine.slot import Slot

MOST_SINGLES = 63
"""Messages that are asked for one by one after streaks that were interrupted, at most."""


class PermitShare(Protocol):
    """A share of a limit; see `qdo.fleet.protocol.shares.LimitShare`."""

    fault: str | None
    starts: StartPool
    pools: tuple[Pool, ...]

    @property
    def has_share(self) -> bool: ...

    @property
    def why(self) -> str | None: ...

    def has_free(self) -> bool: ...

    def take(self) -> None: ...

    def give_back(self) -> bool: ...

    def wait(self, count: int) -> bool: ...

    def awaits_token(self) -> bool: ...


class RowGate(Protocol):
    """Starts messages of a job with limits; see `limits.Gate`."""

    limits: Any
    allows_streak: bool

    def due(self, queue: str, fence: int) -> float: ...

    def note_start(self, queue: str, fence: int) -> None: ...


class GatedRows:
    """Rows of which each is returned with permits; ends early where there are none."""

    __slots__ = ("_fence", "_gate", "_rows", "_slot")

    def __init__(self, gate: RowGate, slot: Slot, rows: Any, fence: int) -> None:
        self._gate = gate
        self._slot = slot
        self._rows = rows
        self._fence = fence

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if not self._renew():
            raise StopIteration
        row: Row = next(self._rows)
        self._slot.grant.started = True
        self._gate.note_start(self._slot.queue, self._fence)
        return row

    def __length_hint__(self) -> int:
        return length_hint(self._rows)

    def _renew(self) -> bool:
        """Return whether a message may start, with permits in the grant of the slot."""
        slot, gate = self._slot, self._gate
        grant = slot.grant
        if grant is None:
            return False
        if grant.started and (
            gate.due(slot.queue, self._fence) > gate.limits.clock() or not grant.renew()
        ):
            grant.release()
            slot.grant = None
            return False
        return True


class StreakRows(GatedRows):
    """The fetched rows of a queue, in streaks where that is possible."""

    __slots__ = ("_most", "_shares")

    def __init__(self, gate: RowGate, slot: Slot, rows: Rows, fence: int) -> None:
        super().__init__(gate, slot, rows, fence)
        self._shares: tuple[PermitShare, ...] = ()
        self._most = 0

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Rows]:
        """Return the rows in parts; the first row of each may start as it is returned."""
        slot, gate = self._slot, self._gate
        streaks: Streaks = gate.limits.streaks
        while True:
            streaks.end(self)
            if not length_hint(self._rows) or not self._renew():
                return
            grant = slot.grant
            grant.started = True
            gate.note_start(slot.queue, self._fence)
            if streaks.may_begin and gate.allows_streak and grant.allows(length_hint(self._rows)):
                streaks.begin(self)
                grant.streak = self
                self._shares, self._most = grant.shares, length_hint(self._rows)
                yield self._rows
            else:
                yield islice(self._rows, 1)

    def settle(self) -> None:
        """Count what was started since the streak began; its first start was counted before."""
        count = self._most - length_hint(self._rows) - 1
        now = self._gate.limits.clock()
        for share in self._shares:
            share.starts.take_more(count, now)
        self._shares = ()

    def interrupt(self) -> None:
        """End the streak between two messages: the loop that runs them finds no further row."""
        self.settle()
        rest = iter(list(self._rows))
        if self._slot.rows is self._rows:
            self._slot.rows = rest
        self._rows = rest


class Streaks:
    """The streaks of a process."""

    def __init__(self) -> None:
        self._running: list[StreakRows] = []
        self._pause = self._singles = 0

    @property
    def may_begin(self) -> bool:
        """Whether the next message may begin one, or is asked for alone.

        An interruption costs time for each row that was fetched.
        """
        if self._singles:
            self._singles -= 1
            return False
        return True

    def begin(self, rows: StreakRows) -> None:
        """Begin a streak."""
        self._running.append(rows)

    def end(self, rows: StreakRows) -> None:
        """End a streak at its end, if it is one."""
        if rows in self._running:
            self._running.remove(rows)
            rows.settle()
            self._pause = 0

    def interrupt(self) -> None:
        """End all streaks between two messages."""
        if self._running:
            running, self._running = self._running, []
            self._pause = self._singles = min(2 * self._pause + 1, MOST_SINGLES)
            for rows in running:
                rows.interrupt()
