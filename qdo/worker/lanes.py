"""A queue whose messages need not all wait for each other: ``order="key"`` and ``order="none"``.

A *lane* is a queue within the queue: the messages of one key, in their order; with
``order="none"`` every message is a lane of its own. A lane ends its messages by the same rules
as a queue (`pipeline`, `outcome`), so a back-off, a block or a dead letter that cannot be
stored holds up its own lane only.

=========  =========================================================  =======================
a lane is  meaning                                                    next
=========  =========================================================  =======================
ready      its first message may be started                           running
running    a greenlet of its own runs its messages                    ready, parked, blocked,
                                                                      (gone, when it is empty)
parked     until a time: the back-off of a message or of the broker   ready
blocked    its first message waits for an operator                    (a new claim)
=========  =========================================================  =======================

The turn of such a queue lasts for as long as a lane runs: it reads ahead, starts lanes while
places are free, and waits for one to end. What it holds is bounded: at most `WINDOW` pending
messages and `HELD_BYTES` of bodies. A key with so many messages before it that they fill the
window stops the queue until it gets on; any fewer stop nobody else.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

import gevent
from gevent.event import Event

from qdo.coordination.layout import Above, Marks, encode
from qdo.coordination.slots import Claim
from qdo.worker.counters import Counters
from qdo.worker.fetching import Fetcher, Row, Rows
from qdo.worker.hands import Hands
from qdo.worker.outcome import UNREADABLE
from qdo.worker.slot import JobAborted, MessageExpired, Registration, Slot, Turn
from qdo.worker.window import Window

WINDOW = 10_000
"""Pending messages of one queue at most: read, and not done."""
HELD_BYTES = 32 << 20
"""What they take at most, so that a few large ones do not fill the memory."""
HELD_BYTES_IN_ALL = 128 << 20
"""The same for all queues of a process; a queue of which nothing is read may always read."""
LOOK_SECONDS = 0.05
"""How often a turn looks whether the lease runs again, or the other queues hold less."""
_ROW_BYTES = 400
"""What a row takes beside its body, with its place in window and lane."""
RUNS = 500
"""Runs of done messages recorded above the watermark at most: some 10 KB of JSON in the queue
node. What is done beyond them is repeated after a handover."""
MARKS_BYTES = 64 << 10
"""JSON of failing and blocked messages recorded at most, the blocked ones first: a node must not
grow with the keys that fail. Messages beyond them count their attempts from 1 after a handover."""


class Places:
    """What the lanes of all queues of a worker process share.

    At most so many of them run at once.

    :ivar held: about how many bytes the messages take that they have read.
    """

    def __init__(self, count: int) -> None:
        self.held = 0
        self._free = count
        self._waiting: dict[Lanes, None] = {}

    def take(self, lanes: Lanes) -> bool:
        """Take a place; where none is free, `lanes` is told when one is."""
        if not self._free:
            self._waiting[lanes] = None
            return False
        self._free -= 1
        return True

    def give_back(self) -> None:
        """Take note that a lane has stopped running, and tell who waits longest."""
        self._free += 1
        self.pass_on()

    def pass_on(self) -> None:
        """Tell who waits longest of a free place that nobody else wants."""
        while self._free and self._waiting:
            lanes = next(iter(self._waiting))
            del self._waiting[lanes]
            if lanes.wants_place:
                lanes.look_again()
                return


class LaneClaim(Claim):
    """The queue's claim as one lane sees it: with a `done` and `marks` of its own."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Claim, done: int) -> None:
        self._whole = whole
        super().__init__(whole.queue, whole.fence, done, whole.lease)

    @property
    def open(self) -> bool:
        """Whether messages may be started: only the whole claim is ever closed."""
        return self._whole.open

    @open.setter
    def open(self, value: bool) -> None:
        pass


class LaneSlot(Slot):
    """The queue's slot as one lane sees it: with a message, back-off and dead letter of its own."""

    in_lane = True

    __slots__ = ("_lane_claim", "_whole", "_whole_claim")

    def __init__(self, whole: Slot, whole_claim: Claim, lane_claim: LaneClaim) -> None:
        self._whole = whole
        self._whole_claim = whole_claim
        self._lane_claim = lane_claim
        super().__init__(whole.queue)

    @property
    def claim(self) -> Claim | None:
        """The lane's claim while the queue's is in force."""
        return self._lane_claim if self._whole.claim is self._whole_claim else None

    @claim.setter
    def claim(self, value: Claim | None) -> None:
        pass

    @property
    def member(self) -> Registration | None:
        """The registration that made the queue's claim."""
        return self._whole.member

    @member.setter
    def member(self, value: Registration | None) -> None:
        pass


class Lane:
    """The messages of one key that are read and not done: an iterator over them.

    Asked for the next one it first takes leave of those that are done meanwhile; what it gives
    stays the first one until ``claim.done`` has reached it.

    :ivar marks: of messages that failed under other owners, in the order of the messages: each
        one becomes that of the claim once the message of the one before it has ended.
    """

    __slots__ = ("_owner", "claim", "key", "marks", "rows", "slot")

    def __init__(self, owner: Lanes, key: object, slot: LaneSlot, claim: LaneClaim) -> None:
        self._owner = owner
        self.key = key
        self.slot = slot
        self.claim = claim
        self.rows: deque[Row] = deque()
        self.marks: deque[Marks] = deque()

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        self._owner.settle(self)
        self._owner.drop_expired(self)
        if not self.rows or self._first_is_marked():
            raise StopIteration
        self._owner.counters.attempts += 1
        return self.rows[0]

    def _first_is_marked(self) -> bool:
        """Whether the first message failed elsewhere and the claim does not know of it yet.

        It may be read while the lane runs; what is due for it is seen to when the next run begins.
        """
        return bool(self.marks) and self.marks[0].position == self.rows[0][0]

    def take_marks(self) -> None:
        """Have the claim know of the next message that failed elsewhere."""
        claim = self.claim
        if self.marks and (claim.marks is None or claim.marks.position <= claim.done):
            claim.marks = self.marks.popleft()

    def settle(self) -> None:
        """Take leave of the messages that are done, and bring the queue's claim up to date."""
        self._owner.settle(self)
        self._owner.look()


class Lanes:
    """The lanes of one claim of one queue.

    :ivar claim: the queue's claim; its `done`, `marks` and `above` are brought up to date when
        they are recorded.
    :param run: runs messages of a lane until a time, and says how that ended.
    :param trouble: has a slot wait for its broker, which failed.
    :param note_expired: counts a message that the broker took back.
    :param limit: lanes that may run at once.
    :param alone: there is one lane only, for the queue has an order of its own: where that is
        blocked nothing is read.
    :param key_of: the lane of a row, by what it returns.
    :param hold_seconds: how long the broker may hide a message at most, None if it never does.
    """

    def __init__(
        self,
        slot: Slot,
        claim: Claim,
        *,
        run: Callable[[Lane, float], Turn],
        trouble: Callable[[Slot, str, Exception], Turn],
        note_expired: Callable[[Slot, int], None],
        limit: int,
        alone: bool,
        key_of: Callable[[Row], object],
        fetcher: Fetcher,
        places: Places,
        hands: Hands,
        counters: Counters,
        turn_seconds: float,
        hold_seconds: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.claim = claim
        self.counters = counters
        self._run_lane = run
        self._trouble = trouble
        self._note_expired = note_expired
        self._slot = slot
        self._limit = limit
        self._alone = alone
        self._key_of = key_of
        self._fetcher = fetcher
        self._places = places
        self._hands = hands
        self._turn_seconds = turn_seconds
        self._clock = clock
        above = claim.above or Above()
        marks = above.marks if claim.marks is None else (claim.marks, *above.marks)
        self._positions = claim.positions
        self._subscription = slot.subscription
        # Positions that mean nothing to others were not recorded to be skipped.
        self._window = Window(claim.done, above.runs if self._positions.lasting else ())
        self._known = {
            self._positions.name(each.position): each
            for each in marks
            if each.position > claim.done
        }
        self._known_until = inf if hold_seconds is None else clock() + hold_seconds
        # Reading is ahead of what is done: it has a slot and a claim of its own.
        self._source = Slot(slot.queue)
        self._source.subscription = slot.subscription
        self._source.member = slot.member
        self._cursor = Claim(slot.queue, claim.fence, claim.done, claim.lease)
        self._lanes: dict[object, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._running: dict[Lane, Any] = {}
        self._parked: list[tuple[float, int, Lane]] = []
        self._order = count()
        self._bytes = 0
        self._tip = False
        self._turning = False
        self._stopping = False
        self._changed = False
        self._error: BaseException | None = None
        self._news = Event()
        claim.look = self.look

    # --- the turn ---------------------------------------------------------------------

    def turn(self) -> Turn:
        """Run lanes until none has anything to do, or the claim or the lease is over."""
        self._tip = False
        self._turning = True
        try:
            while True:
                self._news.clear()
                over = self._advance()
                self._places.pass_on()
                if not self._running and over is not None:
                    break
                self._news.wait(self._pause(over))
        finally:
            self._turning = False
            # Thousands of queues are idle at a time: they keep no reader.
            self._fetcher.clear(self._source)
        if self._error is not None:
            raise self._error
        return over

    def _advance(self) -> Turn | None:
        """Start what can be started; say how the turn ends once nothing runs, None: go on."""
        claim, now = self.claim, self._clock()
        if not claim.open or self._slot.claim is not claim:
            return Turn.ENDED
        if self._stopping or (self._alone and self._is_blocked()):
            return Turn.HELD
        if now >= claim.lease.until:
            return Turn.PAUSED
        while self._parked and self._parked[0][0] <= now:
            self._ready.append(heapq.heappop(self._parked)[2])
        while self._start_ready() and self._wants_more():
            self._read(now)
        if self._running or self._ready:
            return None
        due = [self._source.not_before] if self._source.not_before > now else []
        due += [self._parked[0][0]] if self._parked else []
        if not self._tip and self._places.held >= HELD_BYTES_IN_ALL:
            due.append(now + LOOK_SECONDS)
        if due:
            self._slot.not_before = min(due)
            return Turn.WAIT
        return Turn.TIP

    def _is_blocked(self) -> bool:
        return any(_is_blocked(lane.claim.marks) for lane in self._lanes.values())

    def _start_ready(self) -> bool:
        """Start lanes while there are any and places are free; return whether places are left."""
        while len(self._running) < self._limit:
            if not self._ready:
                return True
            if not self._places.take(self):
                return False
            lane = self._ready.popleft()
            self._running[lane] = gevent.spawn(self._run, lane)
        return False

    def _wants_more(self) -> bool:
        if self._tip or self._source.not_before > self._clock():
            return False
        if not self._window:
            return True
        full = len(self._window) >= WINDOW or self._bytes >= HELD_BYTES
        return not full and self._places.held < HELD_BYTES_IN_ALL

    def _pause(self, over: Turn | None) -> float | None:
        """Return how long the turn may wait for a lane to end; None for as long as it takes."""
        if over is not None:
            return LOOK_SECONDS if over is Turn.PAUSED else None
        due = [self.claim.lease.until]
        if self._source.not_before > self._clock():
            due.append(self._source.not_before)
        if self._parked and len(self._running) < self._limit:
            due.append(self._parked[0][0])
        return max(0.0, min(due) - self._clock())

    def wake(self) -> None:
        """Look again: there may be new messages."""
        self._tip = False
        self._news.set()

    def look_again(self) -> None:
        """Look again: there is a free place."""
        self._news.set()

    @property
    def takes_more(self) -> bool:
        """Whether messages that come now may be started while all that were read wait."""
        return not self._alone and self._source.not_before <= self._clock()

    @property
    def wants_place(self) -> bool:
        """Whether a lane waits for nothing but a place."""
        return self._turning and bool(self._ready) and len(self._running) < self._limit

    def stop(self) -> None:
        """Start nothing more, whatever the claim says."""
        self._stopping = True
        self._news.set()

    def in_hand(self) -> list[Slot]:
        """Return the slots of lanes with a message in hand."""
        return [lane.slot for lane in self._running if lane.slot.message is not None]

    def rest(self) -> bool:
        """Return whether nothing is pending, with the claim up to date."""
        self.look()
        if self._known and not self._window and self._clock() >= self._known_until:
            self._known.clear()  # nothing can be hidden for so long: they are gone
            self._changed = True
            self.look()
        return not self._window and not self._known

    def drop(self) -> None:
        """Take note that what was read is not needed any more."""
        self._places.held -= self._bytes
        self._bytes = 0

    # --- reading ----------------------------------------------------------------------

    def _read(self, now: float) -> None:
        """Take in the next batch of the queue."""
        try:
            rows: Rows = self._fetcher.fetch(self._source, self._cursor)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            self._trouble(self._source, UNREADABLE, error)
            return
        taken = 0
        for row in rows:
            taken += 1
            self._cursor.done = row[0]
            if self._window.add(row[0]):
                self._put(row)
            else:
                self._changed = True
        self._fetcher.learn(self._source, taken, 0)
        self._tip = not taken

    def _put(self, row: Row) -> None:
        key = self._key_of(row)
        lane = self._lanes.get(key)
        if lane is None:
            claim = LaneClaim(self.claim, row[0] - 1)
            lane = Lane(self, key, LaneSlot(self._slot, self.claim, claim), claim)
            self._lanes[key] = lane
            self._ready.append(lane)
        marks = self._known.pop(self._positions.name(row[0]), None) if self._known else None
        if marks is not None:
            lane.marks.append(replace(marks, position=row[0]))
        lane.rows.append(row)
        size = len(row[1]) + _ROW_BYTES
        self._bytes += size
        self._places.held += size

    # --- a lane -----------------------------------------------------------------------

    def _run(self, lane: Lane) -> None:
        """Run a lane until it has nothing to do or others wait: the body of its greenlet."""
        slot = lane.slot
        slot.hand = self._hands.take(self._slot.label)
        slot.greenlet = gevent.getcurrent()
        slot.started_at = self._clock()
        turn = Turn.ENDED
        try:
            turn = self._run_on(lane)
        except MessageExpired:
            # It came when the job had ended: the lane goes on, without what it has no more.
            turn = Turn.MORE
        except JobAborted:
            self._stopping = True
        except BaseException as error:  # noqa: BLE001 - raised where the turn ends
            self._error, self._stopping = error, True
        finally:
            self._hands.give_back(slot.hand)
            slot.greenlet = slot.message = None
            del self._running[lane]
            self._places.give_back()
            self._put_away(lane, turn)
            self._news.set()

    def _run_on(self, lane: Lane) -> Turn:
        claim = self.claim
        while True:
            now = self._clock()
            if not claim.open or now >= claim.lease.until or self._stopping:
                return Turn.MORE
            until = min(claim.lease.until, now + self._turn_seconds)
            self.drop_expired(lane)
            lane.take_marks()
            turn = self._run_lane(lane, until)
            self.settle(lane)
            if turn is not Turn.MORE or not lane.rows or self._ready:
                return turn
            # Even a lone busy lane must let heartbeats and checkpoints through.
            gevent.sleep(0)

    def settle(self, lane: Lane) -> None:
        """Take leave of the messages of a lane that are done."""
        rows, done = lane.rows, lane.claim.done
        while rows and rows[0][0] <= done:
            position, body, _, _ = rows.popleft()
            self._window.done(position)
            if self._subscription is not None:
                self._subscription.done(position)
            size = len(body) + _ROW_BYTES
            self._bytes -= size
            self._places.held -= size
            self._changed = True

    def drop_expired(self, lane: Lane) -> None:
        """Pass over what the broker took back before it was started; it comes again."""
        source = self._subscription
        if source is None:
            return
        while lane.rows and not source.is_held(lane.rows[0][0]):
            position = lane.rows[0][0]
            self._note_expired(self._slot, position)
            if lane.slot.letter is not None and lane.slot.letter.position == position:
                lane.slot.letter = lane.slot.letter_of = None  # it would be stored twice
            lane.claim.done = position
            self.settle(lane)

    def _put_away(self, lane: Lane, turn: Turn) -> None:
        """Put a lane where it belongs after it ran."""
        self._changed = True
        if not lane.rows:
            del self._lanes[lane.key]
        elif turn is Turn.WAIT:
            heapq.heappush(self._parked, (lane.slot.not_before, next(self._order), lane))
        elif turn is not Turn.HELD:
            self._ready.append(lane)
        elif not _is_blocked(lane.claim.marks):
            self._stopping = True  # the job asked for it

    # --- what is recorded -------------------------------------------------------------

    def look(self) -> None:
        """Bring `done`, `marks` and `above` of the claim up to date."""
        claim = self.claim
        if self._subscription is not None:
            claim.unconfirmed = self._subscription.unconfirmed()
        if not self._changed:
            return
        self._changed = False
        claim.done = self._window.last
        marks = _recorded(self._marks())
        # The first one is what an operator sees and decides on.
        claim.marks = marks[0] if marks else None
        runs = self._window.runs(RUNS) if self._positions.lasting else ()
        claim.above = Above(runs, tuple(marks[1:])) if runs or marks[1:] else None

    def _marks(self) -> Iterator[Marks]:
        for known in self._known.values():
            # Not received again yet, however far others are done meanwhile.
            yield replace(known, position=self._positions.ahead(known.position, self._window.last))
        for lane in self._lanes.values():
            yield from lane.marks
            marks = lane.claim.marks
            if marks is not None and marks.position > lane.claim.done:
                yield marks


def _recorded(found: Iterable[Marks]) -> list[Marks]:
    """Return what is recorded of marks, blocked ones first: as many as may stand in a node."""
    chosen: list[Marks] = []
    size = 0
    for marks in sorted(found, key=lambda each: (not each.blocked, each.position)):
        size += len(encode(marks.dump()))
        if chosen and size > MARKS_BYTES:
            break
        chosen.append(marks)
    return chosen


def _is_blocked(marks: Marks | None) -> bool:
    return marks is not None and marks.blocked
