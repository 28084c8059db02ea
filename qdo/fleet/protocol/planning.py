"""What a process should hold of a limit, and when it lets others go first: see `shares`."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from qdo.fleet.limit_node import ShareHolder, ShareHolders
from qdo.fleet.protocol.pools import Pool, targets

TURN_SECONDS = 0.1
"""How long a process keeps a permit that others wait for, if it has used it."""
UNUSED_SECONDS = 1.0
"""About how long it keeps one that it cannot use, because it lacks a permit of another limit."""
IDLE_SECONDS = 1.0
"""How long a process wants what it does not use, if no other process lacks it."""
LACK_SECONDS = 0.1
"""The same if another process lacks it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One pool as this process would write it.

    :ivar holders: all processes, in order.
    :ivar cap: its own cap afterwards.
    :ivar written: its share according to the node as read.
    """

    holders: ShareHolders
    cap: int
    written: int


class Planner:
    """Plans the shares of one process.

    :ivar act_at: when a plan may be another one though nothing has happened.
    :ivar changed: whether a plan switched a pool between limited and not; the caller resets it.
    :param worker: name of its worker node.
    :param chance: returns a random number from 0 to 1.
    """

    def __init__(
        self, worker: str, clock: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        self.act_at = float("inf")
        self.changed = False
        self._worker = worker
        self._clock = clock
        self._chance = chance
        self._patience = chance()

    def plan(self, pool: Pool, holders: ShareHolders, total: int | None, gone: Set[str]) -> Plan:
        """Return the holders of a pool as they should be, and lower the cap at once.

        :param total: what all may hold together, None for any number.
        :param gone: processes that have ended.
        """
        now = self._clock()
        if (total is None) != pool.unlimited:
            self.changed = True
            pool.interrupt()
            pool.unlimited = total is None
        rest = tuple(each for each in holders if each.worker not in gone)
        mine = next((each for each in rest if each.worker == self._worker), None)
        written = 0 if mine is None else mine.held
        if pool.held > written:  # somebody took it out
            pool.acknowledge(written, min(pool.cap, written), now)
        if total is None:
            return Plan(tuple(each for each in rest if each is not mine), 0, 0)
        wants = min(total, self._wants(pool, mine, rest, total))
        if not wants and not written and not pool.occupied:
            return Plan(tuple(each for each in rest if each is not mine), 0, 0)
        own = ShareHolder(self._worker, written, wants)
        rest = tuple(own if each is mine else each for each in rest)
        if mine is None:
            rest = (*rest, own)
        elif self._turn_is_over(pool, rest, total):
            # It goes to the end with the last permit that it gives up: writes are 50 ms apart.
            pool.limit(0, now)
            if pool.occupied:
                less = replace(own, held=min(written, pool.occupied))
                return Plan(tuple(less if each is own else each for each in rest), 0, written)
            rest = (*(each for each in rest if each is not own), own)
        target = targets(total, rest)[rest.index(own)]
        if target < pool.cap:
            pool.limit(target, now)
        free = total - sum(each.held for each in rest)
        held = max(target, pool.occupied)
        if held > written:
            held = min(held, written + max(0, free))
        if not wants and not held:
            return Plan(tuple(each for each in rest if each is not own), 0, written)
        rest = tuple(replace(each, held=held) if each is own else each for each in rest)
        return Plan(rest, target, written)

    def _wants(self, pool: Pool, mine: ShareHolder | None, rest: ShareHolders, total: int) -> int:
        """Return what the node should say this process wants; damped."""
        now = self._clock()
        peak = min(total, pool.wanted(now))
        before = 0 if mine is None else mine.wants
        if peak > before:
            return peak if peak > pool.held or not before else before
        dealt = targets(total, rest)
        lack = any(dealt[index] < each.wants for index, each in enumerate(rest))
        seconds = LACK_SECONDS if lack else IDLE_SECONDS
        wants = before
        if now >= pool.peak_since + seconds:
            wants = peak
            pool.measure_again(now)
        if pool.demand(now) < wants:
            self.act_at = min(self.act_at, pool.peak_since + seconds)
        return wants

    def _turn_is_over(self, pool: Pool, rest: ShareHolders, total: int) -> bool:
        """Return whether this process should let others go first."""
        dealt = targets(total, rest)
        starved = any(each.wants and not dealt[index] for index, each in enumerate(rest))
        index = next(at for at, each in enumerate(rest) if each.worker == self._worker)
        if not starved or not rest[index].held or not dealt[index]:
            return False
        stay = TURN_SECONDS
        if not pool.used:
            stay += pool.use_seconds() + UNUSED_SECONDS * (0.5 + self._patience)
        over = pool.got_at + stay
        if self._clock() < over:
            self.act_at = min(self.act_at, over)
            return False
        return True
