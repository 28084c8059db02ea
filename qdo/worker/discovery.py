"""Two duties of a worker toward its broker: its queues, and messages too old to keep.

Discovery is the leader's: queues that the broker knows and the coordinator does not get their
node, without which nobody can be given them; those of brokers whose queues come and go are looked
after as `census` says. Retention is the owner's: it alone knows up to where a queue is done.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable

from qdo.brokers.base import Broker
from qdo.describe import describe
from qdo.errors import QdoError
from qdo.names import name_fault
from qdo.worker.slot import Slot
from qdo.worker.tending import Leader, Tending

_log = logging.getLogger(__name__)

LEADER_LOOK_SECONDS = 0.1
"""How often the others look whether they lead now: a question to the own memory."""
SOON_SECONDS = 0.05
"""Names that arrive within this time are created together."""
AGAIN_SECONDS = 1.0
"""Pause after a failure of the coordinator."""
TEND_SECONDS = 5.0
"""Queues that come and go are looked after at least so often: the term may have changed unseen."""
RETIRE_SHARE = 0.05
"""A queue is looked at this often, as a share of the retention time, within the limits below."""
RETIRE_MIN_SECONDS = 10.0
RETIRE_MAX_SECONDS = 3600.0


def come_and_go(broker: Broker) -> bool:
    """Return whether queues of this broker vanish or end, so that their nodes must be read."""
    return broker.vanish_misses is not None or broker.finished_text is not None


class Discovery:
    """Hands the broker's queues to the coordinator while its member leads."""

    def __init__(self, broker: Broker, clock: Callable[[], float]) -> None:
        self._broker = broker
        self._clock = clock
        self._leader: Leader | None = None
        self._tending: Tending | None = None
        self._given: set[str] = set()
        self._fresh: set[str] = set()
        self._refused: set[str] = set()
        self._list_at = 0.0

    def heard(self, names: Iterable[str]) -> bool:
        """Take note of queues with messages; return whether one was not known here."""
        fresh = set(names) - self._given
        self._fresh |= fresh
        return bool(fresh)

    def step(self, member: Leader | None) -> float:
        """Hand over what is new; return after how many seconds to look again.

        What was handed over by an earlier leader, or in an earlier term, is not remembered:
        creating a node that exists is harmless, a queue without a node is not.
        """
        if member is None or not member.is_leader():
            self._leader = self._tending = None
            self._fresh.clear()
            return LEADER_LOOK_SECONDS
        now = self._clock()
        if member is not self._leader:
            self._leader = member
            self._given.clear()
            self._list_at = now
            self._tending = Tending(self._broker) if come_and_go(self._broker) else None
        if self._tending is None:
            return self._hand_over(member, now)
        try:
            return self._tend(self._tending, member, now)
        except QdoError as error:
            _log.warning("queues cannot be looked after, tried again soon: %s", describe(error))
            return AGAIN_SECONDS

    def _hand_over(self, member: Leader, now: float) -> float:
        fresh, self._fresh = self._fresh - self._given, set()
        if now >= self._list_at:
            self._list_at = now + self._broker.list_seconds
            self._given = set(self._listed() or ())
            # Of a hundred thousand names most have their nodes.
            fresh |= self._given.difference(member.queue_names() or ())
        self._given |= fresh
        usable = self._usable(fresh)
        if usable:
            member.create_queues(usable)
        return max(SOON_SECONDS, self._list_at - now)

    def _tend(self, tending: Tending, member: Leader, now: float) -> float:
        if not tending.look(member):
            return SOON_SECONDS
        if now >= self._list_at:
            self._list_at = now + self._broker.list_seconds
            names = self._listed()
            if names is not None and tending.listed(names):
                self._given = set(names)
                self._fresh.update(names)
                tending.look_through(member)
        self._given |= self._fresh
        self._fresh = fresh = self._fresh - tending.nodes
        pause = tending.act(member, self._usable(fresh), now)
        self._fresh = self._fresh - fresh
        return max(SOON_SECONDS, min(pause, self._list_at - now, TEND_SECONDS))

    def _listed(self) -> list[str] | None:
        try:
            # One text for one name: others keep it too.
            return list(map(sys.intern, self._broker.queues()))
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "queues cannot be listed, tried again in %g s: %s",
                self._broker.list_seconds,
                describe(error),
            )
            return None

    def _usable(self, names: Iterable[str]) -> list[str]:
        return [name for name in sorted(names) if self._is_usable(name)]

    def _is_usable(self, name: str) -> bool:
        fault = name_fault(name)
        if fault is not None and name not in self._refused:
            self._refused.add(name)
            _log.error("queue %r is not processed: no znode can have its name: %s", name, fault)
        return fault is None


class Retention:
    """Deletes done messages that are older than the retention time, a few queues at a time."""

    def __init__(
        self, broker: Broker, retention_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._broker = broker
        self._retention_seconds = retention_seconds
        self._period = min(
            max(retention_seconds * RETIRE_SHARE, RETIRE_MIN_SECONDS), RETIRE_MAX_SECONDS
        )
        self._clock = clock
        self._round: list[str] = []
        self._round_ends = clock() + self._period

    def step(self, slots: dict[str, Slot]) -> float:
        """Look at the next owned queue; return after how many seconds to look again.

        A round through all owned queues takes a period, so that the deletes of thousands of
        queues are spread out.
        """
        now = self._clock()
        if not self._round:
            if now < self._round_ends:
                return self._round_ends - now
            self._round = sorted(slots)
            self._round_ends = now + self._period
        if self._round:
            self._retire(slots.get(self._round.pop()))
        return max(0.0, self._round_ends - now) / (len(self._round) + 1)

    def _retire(self, slot: Slot | None) -> None:
        claim = slot.claim if slot is not None else None
        if claim is None or not claim.open or not claim.done:
            return
        try:
            count = self._broker.retire(claim.queue, claim.done, self._retention_seconds)
        except Exception as error:  # noqa: BLE001 - see `Discovery._listed`
            _log.warning("queue %s: old messages stay for now: %s", claim.queue, describe(error))
            return
        if count:
            _log.info("queue %s: %d old messages deleted", claim.queue, count)
