"""Give turns to ready queues, in the order in which they became ready.

The dispatcher has one slot per owned queue. An idle queue has no greenlet, and its slot takes about
half a kilobyte. Up to `concurrency` greenlets, started on demand, take ready slots from a ring and
run one turn of each. A queue that still has messages after its turn goes to the end of the ring.

========  ============================================================  ===================
state     meaning                                                       next
========  ============================================================  ===================
idle      nothing to do: the last fetch found the queue at its tip      ready (a wake)
ready     in the ring; a claimed queue begins here                      running
running   a greenlet runs its turn                                      idle (at the tip and not
                                                                        woken during the turn),
                                                                        ready, waiting, paused,
                                                                        held, still, gone
waiting   until a time: the backoff of a failed message or broker       ready (the time came; a
                                                                        wake, if others need not
                                                                        wait for that message)
paused    the lease expired                                             ready (lease renewed)
held      nothing more runs under this claim: its queue is blocked,     ready (a new claim, as
          or the worker is stopping                                     after an operator's
                                                                        change), gone
limited   until its job has permits; see `limits`                       ready
still     its queue is paused in the whole fleet                        ready (the pause ends)
gone      released or lost; the slot is not used again                  -
========  ============================================================  ===================

A claim that ends while its queue is running closes immediately, but its slot stays "running" until
the message in flight has ended. Only then does the dispatcher report the end (`finished`) and begin
a newer claim of the same queue.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import gevent

from qdo.coordination.protocol.claims import Claim
from qdo.system.clock import clock as boot_clock
from qdo.system.processes import SIGN
from qdo.text import pluralize
from qdo.worker.engine.pipeline import Pipeline
from qdo.worker.engine.slot import ClaimReports, LaneGroup, Slot, SlotState, TurnResult
from qdo.worker.executors.base import JobAborted

# Seconds between two checks of the leases of paused queues.
PAUSE_CHECK_SECONDS = 0.05

_log = logging.getLogger(__name__)


class SlotAlarms:
    """Keeps waiting and paused slots.

    `take_due` and `take_resumed` yield each slot once. The caller makes the slot ready before it
    takes the next slot.

    :ivar expirations: number of times that a lease expired while queues were ready.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Slot]] = []
        self._paused: list[Slot] = []
        self._pause_check_at = float("inf")
        self._order = count()
        self.expirations = 0

    def wait(self, slot: Slot) -> None:
        """Set the alarm of a waiting slot, unless an earlier alarm is set."""
        # No entry leaves the heap before its time. When an earlier alarm is due, `take_due` sets
        # the later alarm.
        if slot.not_before < slot.alarm:
            slot.alarm = slot.not_before
            heapq.heappush(self._waiting, (slot.alarm, next(self._order), slot))

    def pause(self, slot: Slot, now: float) -> bool:
        """Add a slot whose lease expired; return whether it is the first paused slot."""
        first = not self._paused
        if first:
            self.expirations += 1
            self._pause_check_at = now + PAUSE_CHECK_SECONDS
        self._paused.append(slot)
        return first

    def due(self) -> float:
        """Return the clock time of the next check; `inf` if none is planned."""
        check = self._pause_check_at if self._paused else float("inf")
        return min(check, self._waiting[0][0]) if self._waiting else check

    def take_due(self, now: float) -> Iterator[Slot]:
        while self._waiting and self._waiting[0][0] <= now:
            due, _, slot = heapq.heappop(self._waiting)
            slot.alarm = float("inf")
            # The slot may have run after this alarm was set, and may now wait for a later time.
            if slot.state is SlotState.WAITING and slot.not_before <= due:
                yield slot
            elif slot.state is SlotState.WAITING:
                self.wait(slot)

    def take_resumed(self, now: float) -> Iterator[Slot]:
        """Yield the paused slots whose lease is valid again."""
        if not self._paused or now < self._pause_check_at:
            return
        paused = self._paused
        self._paused = []
        for slot in paused:
            if slot.state is not SlotState.PAUSED or slot.claim is None:
                continue
            if slot.claim.open and now < slot.claim.lease.until:
                yield slot
            else:
                self._paused.append(slot)
        self._pause_check_at = now + PAUSE_CHECK_SECONDS

    @property
    def any_paused(self) -> bool:
        return bool(self._paused)


@dataclass(frozen=True, slots=True)
class Loop:
    """The event loop of a dispatcher."""

    # Starts a greenlet that runs a function.
    spawn: Callable[[Callable[[], None]], Any] = gevent.spawn
    # Lets other greenlets and the event loop run between two turns.
    breathe: Callable[[], None] = gevent.sleep
    # Called when `Dispatcher.due` may have become earlier.
    schedule: Callable[[], None] = lambda: None
    # Called when the last running turn has ended.
    on_quiet: Callable[[], None] = lambda: None
    clock: Callable[[], float] = boot_clock


class Dispatcher:
    """Runs the queues of one worker process, during all of its registrations.

    The member calls the methods that begin, change and end claims.

    :ivar runners: number of greenlets that run turns.
    :param turns: runs the turns. The pipeline reports turns that wait for lanes, and queues that
      got permits.
    :param slots: the slots by queue; shared with parts that are built before the dispatcher.
    """

    def __init__(
        self,
        turns: Pipeline,
        *,
        concurrency: int,
        loop: Loop = Loop(),
        slots: dict[str, Slot] | None = None,
    ) -> None:
        self.slots: dict[str, Slot] = {} if slots is None else slots
        self.runners = 0
        self.concurrency = concurrency
        self.alarms = SlotAlarms()
        self._in_lanes = 0
        self._turns = turns
        self._loop = loop
        self._ready: deque[Slot] = deque()
        turns.report_to(self.lane_turns_changed, self.resume)

    def claimed(self, member: ClaimReports, claim: Claim) -> None:
        """Begin a claim now, or after the message in flight of an older claim."""
        slot = self.slots.get(claim.queue)
        if slot is None:
            slot = self.slots[claim.queue] = Slot(claim.queue)
        if slot.state is SlotState.RUNNING:
            # Two turns of a queue would run two of its messages at once.
            slot.next_claim = member, claim
        else:
            self._begin(slot, member, claim)

    def releasing(self, member: ClaimReports, claim: Claim) -> None:
        """Report the end of a claim immediately, or after its message in flight."""
        slot = self.slots.get(claim.queue)
        if slot is None or (slot.claim is not claim and slot.state is not SlotState.RUNNING):
            member.finished(claim)
        elif slot.state is not SlotState.RUNNING:
            self._remove(slot)
            member.finished(claim)
        else:
            if slot.claim is claim:
                SIGN.end_claim(claim.queue, claim.fence)
            if slot.lanes is not None:
                slot.lanes.notify()
        # A turn without lanes also notices the closed claim. Then `_ended` reports the end.

    def lost(self, claim: Claim) -> None:
        """Drop a lost claim; a turn that still runs under this claim reports nothing more."""
        slot = self.slots.get(claim.queue)
        if slot is None:
            return
        if slot.next_claim is not None and slot.next_claim[1] is claim:
            slot.next_claim = None
        elif slot.claim is claim:
            if slot.state is SlotState.RUNNING:
                SIGN.end_claim(claim.queue, claim.fence)
                # The turn notices the lost claim after its message, and reports nothing.
                slot.claim = None
                if slot.lanes is not None:
                    slot.lanes.notify()
            else:
                self._remove(slot)

    def repositioned(self, member: ClaimReports, old: Claim, new: Claim) -> None:
        """Replace the claim `old` by `new` once the message in flight has ended."""
        self.lost(old)
        if new.before is old:  # the actions of the old claim's jobs still count
            SIGN.forget_claim(old.queue, old.fence)
        self.claimed(member, new)

    def wake(self, queues: Iterable[str]) -> None:
        """Make queues ready that may have new messages."""
        slots = self.slots
        for queue in queues:
            slot = slots.get(queue)
            if slot is None:
                continue
            if slot.state is SlotState.IDLE or (
                slot.state is SlotState.WAITING and slot.takes_more
            ):
                self._make_ready(slot)
            elif slot.state is SlotState.RUNNING:
                # The last fetch of the queue may have missed the new messages.
                slot.woken = True
                if slot.lanes is not None:
                    slot.lanes.wake()

    def resume(self, waiter: Slot | LaneGroup) -> None:
        """Run a queue that got its permits or whose pause has ended."""
        if not isinstance(waiter, Slot):
            waiter.notify()
        elif waiter.state in (SlotState.LIMITED, SlotState.STILL):
            self._make_ready(waiter)

    def tick(self) -> None:
        """Make slots ready whose time has come or whose lease is valid again."""
        now = self._loop.clock()
        for slot in self.alarms.take_due(now):
            self._make_ready(slot)
        resumed = 0
        for slot in self.alarms.take_resumed(now):
            self._make_ready(slot)
            resumed += 1
        if resumed and not self.alarms.any_paused:
            _log.info("the lease is valid again: resuming %s", pluralize(resumed, "queue"))

    def due(self) -> float:
        """Return the clock time at which the caller must call `tick`; `inf` for never."""
        return self.alarms.due()

    def _begin(self, slot: Slot, member: ClaimReports, claim: Claim) -> None:
        # Set the claim first: `end` keeps the lanes of the current claim and drops older lanes.
        slot.member = member
        slot.claim = claim
        self._turns.end(slot)
        slot.broker_failures = 0
        slot.waited = False
        slot.pending_dead_letter = slot.dead_letter_message = None
        slot.label = b""
        slot.gathering_until = 0.0
        slot.singles = 0
        if claim.take_over():
            member.progress(claim)
        # A ready slot is already in the ring. A second entry would give the slot two turns.
        if slot.state is not SlotState.READY:
            self._make_ready(slot)

    def _make_ready(self, slot: Slot) -> None:
        slot.state = SlotState.READY
        self._ready.append(slot)
        self._add_runner()

    def _add_runner(self) -> None:
        if self.runners - self._in_lanes < self.concurrency:
            # Count now. The new greenlet starts only when this greenlet waits, and other calls may
            # come first.
            self.runners += 1
            self._loop.spawn(self._run)

    def lane_turns_changed(self, change: int) -> None:
        """Count a turn that begins to wait for lanes (1) or has ended (-1)."""
        # A turn with lanes may take a long time, so another queue runs a turn in its place.
        self._in_lanes += change
        if self._ready:
            self._add_runner()

    def _run(self) -> None:
        """Run turns until no queue is ready, as the body of a turn greenlet."""
        try:
            while (slot := self._take()) is not None:
                self._run_turn(slot)
                # Even a single busy queue must let heartbeats and checkpoints run.
                self._loop.breathe()
                if self.runners - self._in_lanes > self.concurrency:
                    break  # this greenlet replaced a greenlet that waited for lanes and is back
        except JobAborted:
            # The turn ended before the abort arrived, so only the greenlet ends.
            _log.debug("a turn ended just before it was aborted")
        finally:
            self.runners -= 1
            if self._ready:
                self._add_runner()
            if not self.runners:
                self._loop.on_quiet()

    def _take(self) -> Slot | None:
        while self._ready:
            slot = self._ready.popleft()
            # A claim may have ended while its slot was in the ring.
            if slot.state is SlotState.READY:
                return slot
        return None

    def _run_turn(self, slot: Slot) -> None:
        member = slot.member
        claim = slot.claim
        if member is None or claim is None:
            self._remove(slot)
            return
        slot.state = SlotState.RUNNING
        # Clear before the fetch, because a later wake may concern a message that the fetch misses.
        slot.woken = False
        slot.greenlet = gevent.getcurrent()
        slot.started_at = self._loop.clock()
        result = TurnResult.ENDED
        try:
            result = self._turns.turn(slot, member, claim)
        finally:
            slot.greenlet = slot.message = None
            slot.started_at = 0.0
            self._ended(slot, member, claim, result)

    def _ended(self, slot: Slot, member: ClaimReports, claim: Claim, result: TurnResult) -> None:
        """Set the next state of a slot after its turn."""
        SIGN.forget_claim(claim.queue, claim.fence)
        next_claim = slot.next_claim
        slot.next_claim = None
        if slot.claim is claim and not claim.over and result is not TurnResult.ENDED:
            self._park(slot, result)
            return
        released = slot.claim is claim and claim.over
        self._remove(slot)
        # Report the end only now, after the message in flight. Then another owner may get the
        # queue.
        if released:
            member.finished(claim)
        if next_claim is not None:
            # The next claim may also have ended while it waited for this turn.
            if next_claim[1].over:
                next_claim[1].take_over()
                next_claim[0].finished(next_claim[1])
            else:
                self.claimed(*next_claim)

    def _park(self, slot: Slot, result: TurnResult) -> None:
        woken = slot.woken and (
            result is TurnResult.TIP or (result is TurnResult.WAIT and slot.takes_more)
        )
        if result is TurnResult.MORE or woken:
            slot.state = SlotState.READY
            self._ready.append(slot)
        elif result is TurnResult.TIP:
            slot.state = SlotState.IDLE
            # Thousands of queues may be idle at once, so an idle queue keeps no reader.
            self._turns.clear(slot)
        elif result is TurnResult.WAIT:
            slot.state = SlotState.WAITING
            self.alarms.wait(slot)
            self._loop.schedule()
        elif result in (TurnResult.HELD, TurnResult.LIMITED, TurnResult.STILL):
            self._turns.clear(slot)
            slot.state = SlotState[result.name]
            # During the turn, the queue may have got its permits, or the pause may have ended.
            lifted = result is TurnResult.STILL and slot.claim is not None and slot.claim.open
            if lifted or (result is TurnResult.LIMITED and not slot.awaits_permit):
                self._make_ready(slot)
        else:
            self._pause(slot)

    def _pause(self, slot: Slot) -> None:
        slot.state = SlotState.PAUSED
        if self.alarms.pause(slot, self._loop.clock()):
            _log.warning("the lease expired: no message is started until the coordinator responds")
            self._loop.schedule()

    def _remove(self, slot: Slot) -> None:
        slot.state = SlotState.GONE
        slot.claim = None
        slot.member = None
        self._turns.end(slot)
        if self.slots.get(slot.queue) is slot:
            del self.slots[slot.queue]

    def ready(self) -> int:
        """Return the number of ready queues that wait for a greenlet."""
        return sum(slot.state is SlotState.READY for slot in self._ready)

    def running(self) -> Iterator[Slot]:
        """Return the slots with a running turn, including slots of ended claims."""
        return (slot for slot in self.slots.values() if slot.state is SlotState.RUNNING)

    def in_flight(self) -> Sequence[Slot]:
        """Return the slots with a message in flight; each lane of a queue has its own slot."""
        slots: list[Slot] = []
        for slot in self.running():
            if slot.lanes is not None:
                slots += slot.lanes.in_flight()
            elif slot.message is not None:
                slots.append(slot)
        return slots

    def all_idle(self) -> bool:
        """Return whether every owned queue is at its tip or blocked."""
        return all(
            slot.state is SlotState.HELD
            or slot.waits_for_key
            or (
                slot.state is SlotState.IDLE
                and (slot.subscription is None or slot.subscription.at_tip())
            )
            for slot in self.slots.values()
        )

    def note_progress(self) -> None:
        """Report the progress of the running turns; a turn reports its end itself."""
        if not self.runners:
            return
        for slot in self.running():
            if slot.claim is not None and slot.member is not None:
                slot.member.progress(slot.claim)

    def abort(self) -> None:
        """Raise JobAborted in every turn with a message in flight, without waiting for its end."""
        # Stop the lanes first, because the next lane would start at the end of a lane.
        for slot in self.running():
            if slot.lanes is not None:
                slot.lanes.stop()
        for slot in self.in_flight():
            slot.greenlet.kill(JobAborted(), block=False)
