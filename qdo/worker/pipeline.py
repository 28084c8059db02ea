"""One turn of a queue: fetch, decode, run, outcome, checkpoint.

========== ====================================================================================
step       what happens
========== ====================================================================================
fetch      take the rows that are left, or the batch fetched ahead, or ask the broker
decode     headers and body from JSON; the body stays bytes where the headers say so
run        call the job, while the claim is open, the lease runs and the turn lasts
outcome    done: ``claim.done`` moves to the message; every other one: see `outcome`
checkpoint tell the member once a turn, or after every message where the app asks for it
========== ====================================================================================

Decode and run are one loop (`_run`), and only there is a message handled in line: everything
else happens once a turn or once a failure. A no-op job on 100-byte bodies is called at more than
half the rate of a bare loop that fetches, decodes and calls (`bench/throughput_profile.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter, length_hint
from types import FrameType
from typing import Any

import ujson

from qdo.app import App
from qdo.brokers.base import Broker
from qdo.coordination.lease import clock as boot_clock
from qdo.coordination.slots import Claim
from qdo.errors import UnreachableError
from qdo.headers import is_raw
from qdo.message import Message
from qdo.ordering import Order
from qdo.policies import QueuePolicy, policy_for
from qdo.policy import Policy
from qdo.worker.batches import Batches
from qdo.worker.counters import Counters
from qdo.worker.decoding import Decoder
from qdo.worker.executors.base import Executor, NotStarted
from qdo.worker.fetching import Fetcher, Row, Rows
from qdo.worker.hands import Hands, label
from qdo.worker.lanes import Lane, Lanes, Places
from qdo.worker.observing import Observing
from qdo.worker.outcome import UNREADABLE, Outcomes
from qdo.worker.slot import JobAborted, MessageExpired, Registration, Slot, Turn
from qdo.worker.subscriptions import Subscriptions, look_at, note_end
from qdo.worker.suitability import Suitability
from qdo.worker.work import Work, Works, in_batches

_NO_HEADERS: Mapping[str, str] = {}
_LANE_OF: Mapping[Order, Callable[[Row], object]] = {
    "queue": lambda row: None,
    "key": itemgetter(2),
    "none": itemgetter(0),
}
"""What the messages of a lane have in common."""


class Pipeline:
    """Runs turns; see the module's docstring for their steps.

    :ivar counters: what happened so far.
    :ivar lent: told with 1 that a turn waits for lanes from now on, with -1 that it has ended.
    :param policy: of queues for which neither their job nor `policies` says anything.
    :param on_stop: called with the reason when a job asks to stop the worker.
    :param hands: where turns keep word of the message in hand.
    :param lanes: how many messages may be in hand at once, in all queues with an order of
        "key" or "none".
    """

    def __init__(
        self,
        app: App,
        broker: Broker,
        executor: Executor,
        *,
        policy: Policy,
        fetch: int,
        turn_seconds: float,
        clock: Callable[[], float] = boot_clock,
        chance: Callable[[], float] = random.random,
        policies: Sequence[QueuePolicy] = (),
        on_stop: Callable[[str], None] = lambda reason: None,
        hands: Hands | None = None,
        lanes: int = 100,
    ) -> None:
        self.counters = Counters()
        self._broker = broker
        self._decoder = Decoder(broker)
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._fetcher = Fetcher(broker, fetch, clock)
        self._observing = Observing(app.observers)
        self._hands = hands if hands is not None else Hands(1)
        self._outcomes = Outcomes(
            app,
            broker,
            self._fetcher,
            self.counters,
            self._observing,
            lambda queue: policy_for(queue, app.job_for(queue), policies, policy),
            on_stop,
            clock,
            chance,
        )
        self.lent: Callable[[int], None] = lambda change: None
        self._places = Places(lanes)
        self._batches = Batches(
            self._fetcher,
            self._outcomes,
            self._observing,
            self._hands,
            broker.positions,
            broker.naming,
            self._decoder.decoded,
            lambda queue: policy_for(queue, app.job_for(queue), policies, policy),
            clock,
            chance,
        )
        self._hand_notes = self._hands.notes(broker.positions)
        self._subscriptions = Subscriptions(broker, clock)
        self._works = Works(app, executor, self._observing, Suitability(broker))

    @property
    def context(self) -> Any:
        """What jobs get as their second argument; set it before the first turn."""
        return self._outcomes.context

    @context.setter
    def context(self, context: Any) -> None:
        self._outcomes.context = context

    def clear(self, slot: Slot) -> None:
        """Drop everything read, and what is made again: thousands of queues are idle at a time.

        The next fetch begins after ``claim.done``.
        """
        self._fetcher.clear(slot)
        slot.label = b""
        if slot.lanes is not None and slot.claim is not slot.lanes.claim:
            slot.lanes.drop()
            slot.lanes = None

    def end(self, slot: Slot) -> None:
        """Drop everything of the slot's claim, and give back what the broker let it hold."""
        self.clear(slot)
        self._subscriptions.end(slot)
        self._observing.workers.pop(slot.queue, None)

    # --- a turn ------------------------------------------------------------------------

    def turn(self, slot: Slot, member: Registration, claim: Claim) -> Turn:
        """Process messages of a queue until its turn is over, and say how it ended."""
        if not claim.open:
            return Turn.ENDED
        now = self._clock()
        if now >= claim.lease.until:
            return Turn.PAUSED
        before, marks = claim.done, claim.marks
        try:
            work = self._works.of(slot.queue)
        except UnreachableError as error:
            return self._outcomes.trouble(slot, "nothing is started", error)
        if self._subscriptions.needed and work is not None and slot.subscription is None:
            try:
                self._subscriptions.begin(slot, claim, work.batch)
            except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
                return self._outcomes.trouble(slot, UNREADABLE, error)
        if work is not None and self._in_lanes(claim, work):
            return self._turn_of_lanes(slot, member, claim, work)
        try:
            turn = self._turn_in_line(slot, member, claim, work)
            if turn is Turn.TIP and slot.subscription is not None:
                note_end(slot, claim)
            return turn
        except MessageExpired:
            # It came when the job had ended: what is still held is read anew.
            self._fetcher.clear(slot)
            return Turn.MORE
        except JobAborted:
            return Turn.ENDED
        finally:
            if claim.done != before and slot.subscription is not None:
                slot.subscription.done_through(claim.done)
            if (claim.done != before or claim.marks is not marks) and slot.claim is claim:
                member.progress(claim)

    def _in_lanes(self, claim: Claim, work: Work) -> bool:
        """Return whether messages end one by one, not in line."""
        if claim.above is not None and claim.positions.lasting:
            return True
        return not work.batch and (work.order != "queue" or not claim.positions.lasting)

    def _turn_in_line(
        self, slot: Slot, member: Registration, claim: Claim, work: Work | None
    ) -> Turn:
        if (turn := self._held_up(slot, claim)) is not None:
            return turn
        if work is None:
            return Turn.TIP
        if work.batch:
            return self._turn_of_batch(slot, member, claim, work)
        return self._process(slot, member, claim, work)

    def _held_up(self, slot: Slot, claim: Claim) -> Turn | None:
        """Do what must come before any message; say how the turn ends, None: go on."""
        if slot.letter is not None:
            source = slot.subscription
            if source is None or source.is_held(slot.letter.position):
                return self._outcomes.bury(slot, claim, slot.letter)
            slot.letter = slot.letter_of = None  # its message comes again
        return Turn.HELD if _is_blocked(claim) else None

    def _process(self, slot: Slot, member: Registration, claim: Claim, work: Work) -> Turn:
        try:
            rows = self._fetcher.fetch(slot, claim)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            return self._outcomes.trouble(slot, UNREADABLE, error)
        waiting = length_hint(rows)
        if not waiting:
            return Turn.TIP
        # Looked at again: the fetch may have let others run, and taken its time.
        now = self._clock()
        until = min(claim.lease.until, now + self._turn_seconds)
        if not claim.open or now >= until:
            return Turn.MORE
        self._label(slot, member, in_line=True)
        slot.hand = self._hands.take(slot.label)
        try:
            if work.every_message or _is_marked(claim):
                turn = self._run_singly(slot, member, claim, rows, until, work)
            else:
                turn = self._run(slot, claim, rows, until, work, 1)
        finally:
            self._hands.give_back(slot.hand)
            left = length_hint(rows)
            self.counters.attempts += waiting - left
            self._fetcher.learn(slot, waiting - left, left)
        return turn

    def _label(self, slot: Slot, member: Registration, in_line: bool) -> None:
        if not slot.label:
            slot.label = label(slot.queue, member.name, in_line)
            if self._observing:
                self._observing.workers[slot.queue] = member.name

    def _turn_of_batch(
        self, slot: Slot, member: Registration, claim: Claim, work: Work
    ) -> Turn:
        self._label(slot, member, in_line=True)
        before = claim.done
        turn = self._batches.process(slot, claim, work)
        if work.every_message and claim.done != before and slot.claim is claim:
            member.record(claim)
        return turn

    # --- lanes -------------------------------------------------------------------------

    def _turn_of_lanes(
        self, slot: Slot, member: Registration, claim: Claim, work: Work
    ) -> Turn:
        """Process messages that need not all wait for each other; see `lanes`."""
        if work.order == "queue" and _is_blocked(claim):
            return Turn.HELD  # and nothing is asked for: it is not even read
        lanes = slot.lanes
        self._label(slot, member, in_line=False)
        if lanes is None or lanes.claim is not claim:
            lanes = slot.lanes = self._lanes(slot, member, claim, work)
        self.lent(1)
        try:
            turn = lanes.turn()
        finally:
            self.lent(-1)
        empty = turn is Turn.TIP and lanes.rest()
        if slot.claim is claim:
            if empty:  # thousands of queues are idle at a time
                source = slot.subscription
                slot.lanes = None
                claim.look = None if source is None else look_at(claim, source)
                note_end(slot, claim)
            member.progress(claim)
        return turn

    def _lanes(self, slot: Slot, member: Registration, claim: Claim, work: Work) -> Lanes:
        # What is done above the watermark may have been left by a job with another order. One that
        # takes batches is given each message up to there in a batch of its own.
        if work.batch:
            work = replace(work, call=self._observing.bind(in_batches(work.call)), batch=0)
        return Lanes(
            slot,
            claim,
            run=lambda lane, until: self._run_lane(lane, member, claim, until, work),
            trouble=self._outcomes.trouble,
            note_expired=self._outcomes.note_expired,
            limit=work.lanes,
            alone=work.order == "queue",
            key_of=_LANE_OF[work.order],
            fetcher=self._fetcher,
            places=self._places,
            hands=self._hands,
            counters=self.counters,
            turn_seconds=self._turn_seconds,
            hold_seconds=self._broker.capabilities.hold_seconds,
            clock=self._clock,
        )

    def _run_lane(
        self, lane: Lane, member: Registration, whole: Claim, until: float, work: Work
    ) -> Turn:
        slot, claim = lane.slot, lane.claim
        turn = self._held_up(slot, claim)
        if turn is not None:
            return turn
        if not work.every_message and not _is_marked(claim):
            return self._run(slot, claim, lane, until, work, 1)
        row = next(lane, None)
        if row is None:  # the broker took back what the lane had
            return Turn.MORE
        turn = self._run_one(slot, claim, row, until, work)
        if work.every_message and turn is Turn.MORE and slot.claim is claim:
            lane.settle()
            member.record(whole)
        return turn

    # --- decode and run ----------------------------------------------------------------

    def _run(
        self, slot: Slot, claim: Claim, rows: Rows, until: float, work: Work, attempt: int
    ) -> Turn:
        """Run the job for one row after the other, until the turn or the claim is over.

        The test before each message stands behind the one before it, so that no row is
        taken from `rows` that is not started. One message costs about 0.6 us more than
        decoding its body and calling the job; two attribute accesses more in this loop cost
        2 % of the rate.
        """
        hands = self._hand_notes
        hand = slot.hand
        queue = slot.queue
        fence = claim.fence
        node = self._broker.naming
        context = self.context
        call = work.call
        clock = self._clock
        loads = ujson.loads
        message: Message | None = None
        try:
            for position, body, key, headers in rows:
                hands[hand] = position
                given = _NO_HEADERS if headers is None else loads(headers)
                slot.message = message = Message(
                    queue,
                    position,
                    body if given and is_raw(given) else loads(body),
                    key,
                    given,
                    fence,
                    attempt,
                    node,
                )
                call(message, context)
                claim.done = position
                if not claim.open or clock() >= until:
                    break
        except MessageExpired:
            if message is None:
                return Turn.MORE
            return self._outcomes.expired(slot, claim, message)
        except JobAborted:
            self.counters.unsuccessful += 1
            raise
        except NotStarted:
            # Nothing of this row was run. It is read again, once the queue may be worked on.
            self.counters.attempts -= 1
            self._fetcher.clear(slot)
            return Turn.MORE
        except BaseException as error:  # noqa: BLE001 - SystemExit of a job ends no worker
            row = position, body, key, headers
            if message is None or message.position != position:
                message, error = self._decoder.undecoded(slot, claim, row, attempt, error)
            return self._outcomes.failed(slot, claim, row, message, error)
        return Turn.MORE

    def _run_singly(
        self,
        slot: Slot,
        member: Registration,
        claim: Claim,
        rows: Rows,
        until: float,
        work: Work,
    ) -> Turn:
        """Run the job for one row at a time: each recorded, or until the marked one is done."""
        while True:
            before = claim.done
            turn = self._run_one(slot, claim, next(rows), until, work)
            if work.every_message and claim.done != before and slot.claim is claim:
                member.record(claim)
            over = not claim.open or self._clock() >= until or not length_hint(rows)
            if turn is not Turn.MORE or over or not (work.every_message or _is_marked(claim)):
                return turn

    def _run_one(self, slot: Slot, claim: Claim, row: Row, until: float, work: Work) -> Turn:
        marks = claim.marks
        attempt = 1
        if marks is not None and marks.position == row[0]:
            turn = self._outcomes.before(slot, claim, row, marks)
            if turn is not None:
                self.counters.attempts -= 1  # nothing was run
                return turn
            attempt = marks.attempts + 1
        return self._run(slot, claim, iter((row,)), until, work, attempt)


_RUNNING = (Pipeline._run.__code__, Batches._run.__code__)


def _is_blocked(claim: Claim) -> bool:
    """Return whether a message ahead waits for an operator."""
    return _is_marked(claim) and claim.marks is not None and claim.marks.blocked


def _is_marked(claim: Claim) -> bool:
    """Return whether a message that failed before lies ahead."""
    return claim.marks is not None and claim.marks.position > claim.done


def running_in(frame: FrameType | None) -> tuple[Message, str] | None:
    """Return message and job name of the innermost turn in a stack, None without one.

    Read from the stack of the main thread while it is blocked, so that the turns themselves
    need not leave word of what runs: that would cost something for every message.
    """
    while frame is not None:
        if frame.f_code in _RUNNING:
            message, work = frame.f_locals.get("message"), frame.f_locals.get("work")
            if isinstance(message, Message) and isinstance(work, Work):
                return message, work.name
        frame = frame.f_back
    return None
