"""Which queue gets the next turn: fair, in the order of becoming ready, no queue twice at once.

One slot per owned queue; no greenlet stands by for an idle one (a slot takes about half a
kilobyte). Up to `concurrency` greenlets, made when needed, take ready slots from a ring and run
one turn of each; who still has messages after its turn goes to the end of the ring.

========  ============================================================  ===================
state     meaning                                                       next
========  ============================================================  ===================
idle      nothing to do: the last fetch found the queue at its tip      ready (a wake)
ready     in the ring; a claimed queue begins here                      running
running   a greenlet has its turn                                       idle (at the tip and not
                                                                        woken meanwhile), ready,
                                                                        waiting, paused, held,
                                                                        gone
waiting   until a time: the back-off of a failed message or broker      ready (time came; a wake,
                                                                        where others need not
                                                                        wait for that message)
paused    the lease has run out                                         ready (lease renewed)
held      nothing more runs under this claim: its queue is blocked,     ready (a new claim, as
          or the worker is to stop                                      after an operator's
                                                                        change), gone
gone      released or lost; the slot is not used again                  -
========  ============================================================  ===================

A claim that ends while its queue is running closes at once, but its slot stays running until
the message in hand has ended. Only then is the end reported (`finished`), and only then does
a newer claim of the same queue begin.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import gevent

from qdo.coordination.lease import clock as boot_clock
from qdo.coordination.slots import Claim
from qdo.worker.slot import JobAborted, Registration, Slot, State, Turn

_log = logging.getLogger(__name__)

PAUSE_CHECK_SECONDS = 0.05
"""How often paused queues look whether their lease runs again; only while there are any."""


class Turns(Protocol):
    """What runs the turns: the pipeline."""

    def turn(self, slot: Slot, member: Registration, claim: Claim) -> Turn:
        """Process messages of a queue until its turn is over."""

    def clear(self, slot: Slot) -> None:
        """Forget everything read for the slot's claim; the queue is read anew afterwards."""

    def end(self, slot: Slot) -> None:
        """Forget everything of the slot's claim, and tell the broker that it has ended."""


Spawn = Callable[[Callable[[], None]], Any]


class Dispatcher:
    """The slots of one worker process, over all of its registrations.

    :param spawn: starts a greenlet that runs a function.
    :param breathe: lets other greenlets and the event loop run between two turns.
    :param schedule: called when `due` may have become earlier.
    :param on_quiet: called when the last turn under way has ended.
    """

    def __init__(
        self,
        turns: Turns,
        *,
        concurrency: int,
        spawn: Spawn = gevent.spawn,
        breathe: Callable[[], None] = gevent.sleep,
        schedule: Callable[[], None] = lambda: None,
        on_quiet: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.slots: dict[str, Slot] = {}
        self.runners = 0
        self._lent = 0
        self._turns = turns
        self._concurrency = concurrency
        self._spawn = spawn
        self._breathe = breathe
        self._schedule = schedule
        self._on_quiet = on_quiet
        self._clock = clock
        self._ready: deque[Slot] = deque()
        self._waiting: list[tuple[float, int, Slot]] = []
        self._paused: list[Slot] = []
        self._pause_check_at = float("inf")
        self._order = count()

    # --- what the coordination member says --------------------------------------------

    def claimed(self, member: Registration, claim: Claim) -> None:
        """Begin with a claim; after the message in hand where an older one still runs."""
        slot = self.slots.get(claim.queue)
        if slot is None:
            slot = self.slots[claim.queue] = Slot(claim.queue)
        if slot.state is State.RUNNING:
            slot.successor = member, claim
        else:
            self._begin(slot, member, claim)

    def releasing(self, member: Registration, claim: Claim) -> None:
        """Report the end of a claim: at once, or when the message in hand has ended."""
        slot = self.slots.get(claim.queue)
        if slot is None or (slot.claim is not claim and slot.state is not State.RUNNING):
            member.finished(claim)
        elif slot.state is not State.RUNNING:
            self._remove(slot)
            member.finished(claim)
        elif slot.lanes is not None:
            slot.lanes.look_again()
        # Otherwise, too, the turn sees that the claim is closed, and `_ended` does the rest.

    def lost(self, claim: Claim) -> None:
        """Drop a claim; what still runs under it reports nothing any more."""
        slot = self.slots.get(claim.queue)
        if slot is None:
            return
        if slot.successor is not None and slot.successor[1] is claim:
            slot.successor = None
        elif slot.claim is claim:
            if slot.state is State.RUNNING:
                slot.claim = None
                if slot.lanes is not None:
                    slot.lanes.look_again()
            else:
                self._remove(slot)

    def moved(self, member: Registration, old: Claim, new: Claim) -> None:
        """Go on with `new` in place of `old`, once the message in hand has ended."""
        self.lost(old)
        self.claimed(member, new)

    # --- what the broker and the clock say ---------------------------------------------

    def wake(self, queues: Iterable[str]) -> None:
        """Look at queues that may have new messages."""
        slots = self.slots
        for queue in queues:
            slot = slots.get(queue)
            if slot is None:
                continue
            if slot.state is State.IDLE or (slot.state is State.WAITING and _takes_more(slot)):
                self._make_ready(slot)
            elif slot.state is State.RUNNING:
                slot.woken = True
                if slot.lanes is not None:
                    slot.lanes.wake()

    def tick(self) -> None:
        """Make those ready whose time has come."""
        now = self._clock()
        while self._waiting and self._waiting[0][0] <= now:
            due, _, slot = heapq.heappop(self._waiting)
            slot.alarm = float("inf")
            # A slot may have been claimed anew since, and even wait again, until later.
            if slot.state is State.WAITING and slot.not_before <= due:
                self._make_ready(slot)
            elif slot.state is State.WAITING:
                self._set_alarm(slot)
        if self._paused and now >= self._pause_check_at:
            self._look_at_paused(now)

    def _set_alarm(self, slot: Slot) -> None:
        """Have `tick` look at a waiting slot in time; once, however often it is woken meanwhile."""
        if slot.not_before < slot.alarm:
            slot.alarm = slot.not_before
            heapq.heappush(self._waiting, (slot.alarm, next(self._order), slot))

    def due(self) -> float:
        """Return the clock time at which `tick` has something to do, `inf` for never."""
        check = self._pause_check_at if self._paused else float("inf")
        return min(check, self._waiting[0][0]) if self._waiting else check

    def _look_at_paused(self, now: float) -> None:
        paused, self._paused = self._paused, []
        going_on = 0
        for slot in paused:
            if slot.state is not State.PAUSED or slot.claim is None:
                continue
            if slot.claim.open and now < slot.claim.lease.until:
                self._make_ready(slot)
                going_on += 1
            else:
                self._paused.append(slot)
        self._pause_check_at = now + PAUSE_CHECK_SECONDS
        if going_on and not self._paused:
            _log.info("the lease runs again: going on with %d queues", going_on)

    # --- turns -------------------------------------------------------------------------

    def _begin(self, slot: Slot, member: Registration, claim: Claim) -> None:
        slot.member = member
        slot.claim = claim
        self._turns.end(slot)  # of an older claim, if there is anything
        slot.troubles = 0
        slot.waited = False
        slot.letter = slot.letter_of = None
        slot.label = b""
        slot.gathering_until = 0.0
        slot.alone = 0
        if slot.state is not State.READY:
            self._make_ready(slot)

    def _make_ready(self, slot: Slot) -> None:
        slot.state = State.READY
        self._ready.append(slot)
        self._add_runner()

    def _add_runner(self) -> None:
        if self.runners - self._lent < self._concurrency:
            self.runners += 1
            self._spawn(self._run)

    def lent(self, change: int) -> None:
        """Take note that a turn runs its jobs elsewhere from now on (1), or has ended (-1).

        Such a turn may last long: meanwhile another queue has the turn in its place.
        """
        self._lent += change
        if self._ready:
            self._add_runner()

    def _run(self) -> None:
        """Run turns until no queue is ready: the body of a turn greenlet."""
        try:
            while (slot := self._take()) is not None:
                self._run_turn(slot)
                # Even a lone busy queue must let heartbeats and checkpoints through.
                self._breathe()
                if self.runners - self._lent > self._concurrency:
                    break  # it stood in for one whose turn had been lent, and has ended
        except JobAborted:
            # It was on its way when the turn ended by itself, and this greenlet ends in its place.
            _log.debug("a turn ended just before it was aborted")
        finally:
            self.runners -= 1
            if self._ready:
                self._add_runner()
            if not self.runners:
                self._on_quiet()

    def _take(self) -> Slot | None:
        while self._ready:
            slot = self._ready.popleft()
            if slot.state is State.READY:
                return slot
        return None

    def _run_turn(self, slot: Slot) -> None:
        member, claim = slot.member, slot.claim
        if member is None or claim is None:
            self._remove(slot)
            return
        slot.state = State.RUNNING
        slot.woken = False
        slot.greenlet = gevent.getcurrent()
        slot.started_at = self._clock()
        turn = Turn.ENDED
        try:
            turn = self._turns.turn(slot, member, claim)
        finally:
            slot.greenlet = slot.message = None
            slot.started_at = 0.0
            self._ended(slot, member, claim, turn)

    def _ended(self, slot: Slot, member: Registration, claim: Claim, turn: Turn) -> None:
        """Put a slot where it belongs after its turn."""
        successor, slot.successor = slot.successor, None
        if slot.claim is claim and claim.open and turn is not Turn.ENDED:
            self._park(slot, claim, turn)
            return
        released = slot.claim is claim and not claim.open
        self._remove(slot)
        if released:
            member.finished(claim)
        if successor is not None:
            if successor[1].open:
                self.claimed(*successor)
            else:
                successor[0].finished(successor[1])

    def _park(self, slot: Slot, claim: Claim, turn: Turn) -> None:
        woken = slot.woken and (turn is Turn.TIP or (turn is Turn.WAIT and _takes_more(slot)))
        if turn is Turn.MORE or woken:
            slot.state = State.READY
            self._ready.append(slot)
        elif turn is Turn.TIP:
            slot.state = State.IDLE
            # Thousands of queues are idle at a time: they keep no reader.
            self._turns.clear(slot)
        elif turn is Turn.WAIT:
            slot.state = State.WAITING
            self._set_alarm(slot)
            self._schedule()
        elif turn is Turn.HELD:
            slot.state = State.HELD
            self._turns.clear(slot)
        else:
            self._pause(slot)

    def _pause(self, slot: Slot) -> None:
        slot.state = State.PAUSED
        if not self._paused:
            self._pause_check_at = self._clock() + PAUSE_CHECK_SECONDS
            _log.warning(
                "the lease has run out: no message is started until the coordinator answers"
            )
            self._schedule()
        self._paused.append(slot)

    def _remove(self, slot: Slot) -> None:
        slot.state = State.GONE
        slot.claim = None
        slot.member = None
        self._turns.end(slot)
        if self.slots.get(slot.queue) is slot:
            del self.slots[slot.queue]

    # --- what others want to know -------------------------------------------------------

    def running(self) -> Iterator[Slot]:
        """Give the slots that have a turn now, also of claims that ended."""
        return (slot for slot in self.slots.values() if slot.state is State.RUNNING)

    def in_hand(self) -> Sequence[Slot]:
        """Return the slots with a message in hand; a queue with lanes has one for each."""
        found: list[Slot] = []
        for slot in self.running():
            if slot.lanes is not None:
                found += slot.lanes.in_hand()
            elif slot.message is not None:
                found.append(slot)
        return found

    def all_idle(self) -> bool:
        """Return whether every owned queue was found at its tip, or waits for an operator."""
        return all(
            slot.state is State.HELD
            or (
                slot.state is State.IDLE
                and (slot.subscription is None or slot.subscription.at_tip())
            )
            for slot in self.slots.values()
        )

    def note_progress(self) -> None:
        """Have checkpointed what turns under way have done; turns report their own end.

        Only a turn whose job yields is ever seen here: others run from one end to the other.
        """
        if not self.runners:
            return
        for slot in self.running():
            if slot.claim is not None and slot.member is not None:
                slot.member.progress(slot.claim)

    def abort(self) -> None:
        """Raise JobAborted in every turn that has a message in hand; does not wait for them."""
        for slot in self.running():
            if slot.lanes is not None:
                slot.lanes.stop()
        for slot in self.in_hand():
            slot.greenlet.kill(JobAborted(), block=False)


def _takes_more(slot: Slot) -> bool:
    """Return whether new messages are of use to a queue that waits.

    One that gathers a batch looks whether it is full, and one with lanes has others go on beside
    those that wait.
    """
    if slot.gathering_until:
        return True
    return slot.lanes is not None and slot.lanes.takes_more
