"""The requests of one pool that a worker has in its hands, as a subscription of its engine.

To the engine a pool is a mailbox: a request that was taken is a message that was received. Its
position only numbers what this worker took. Nothing is read ahead of free places, so requests wait
in the broker, where any worker may take them.

A take whose answer was lost may have been stored, also later than the worker has looked. So each
take also returns the requests that the broker counts as this worker's and that it does not run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gevent
from gevent.lock import Semaphore

from qdo.brokers.base import Reader, Subscription
from qdo.brokers.requests import RequestStore, TakenRequest
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.encoding import decoded_headers, with_header
from qdo.message import NORMAL
from qdo.sending.messages import time_text
from qdo.sending.replies import end_request, until_answered
from qdo.sending.sender import Sender
from qdo.system.clock import clock
from qdo.text import describe
from qdo.worker.engine.slot import Row

_log = logging.getLogger(__name__)

MARKS_SECONDS = 0.2
"""How often a worker that runs requests looks whether they were cancelled."""
PASSES = 10
"""Of so many requests that a worker takes from a pool, one is the oldest, whatever its priority. So
more urgent ones cannot delay it forever."""


class _Unrecorded:
    """Receives the reports of a claim for which no node records anything."""

    def progress(self, claim: Claim) -> None:
        pass

    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool:
        return True

    def finished(self, claim: Claim) -> None:
        pass


class PoolSubscription(_Unrecorded, Subscription):
    """What one registration of a worker took of a pool, and the sink of its claim.

    :ivar name: of the registration.
    :ivar positions: by id, also of requests whose end is not stored, or cannot be.
    :ivar idle_seconds: for how long it and its pool have had no requests.
    :ivar taken: how many requests it has taken, the position of the last one.
    :ivar next_due: Unix time in seconds at which the next request is due, None if unknown.
    :param places: returns how many requests may be taken beside a number of held ones.
    :param wake: called when a place is free.
    :param now: returns the Unix time in seconds.
    :param turn: a number of its own, or workers that end after a few requests would never come to
        the oldest ones.
    """

    def __init__(
        self,
        app: Sender,
        store: RequestStore,
        pool: str,
        name: str,
        places: Callable[[int], int],
        wake: Callable[[], None],
        now: Callable[[], float] = time.time,
        turn: int = 0,
    ) -> None:
        self.next_due: float | None = None
        self._app = app
        self._store = store
        self._pool = pool
        self.name = name
        self._places = places
        self._wake = wake
        self._interrupt: Callable[[int], None] = lambda position: None
        self._now = now
        self._held: dict[int, tuple[TakenRequest, Row]] = {}
        self.positions: dict[str, int] = {}
        self._cancelled: dict[int, str] = {}
        self._told: set[int] = set()
        """Positions whose end, or return to the pool, this worker has stored itself."""
        self._done: dict[str, int] = {}
        """Numbers of takes by id, of jobs that have returned since the last take."""
        self._back: set[str] = set()
        """Ids of requests that a take returned although their jobs had returned."""
        self.taken = 0
        self._turn = turn
        self._dry = self._closed = False
        self._look_at = 0.0
        self.idle_seconds = 0.0
        self._used_at = clock()
        self._taking = Semaphore()
        self._ends: list[Any] = []

    # --- for the engine ---

    def subscribe(
        self, queue: str, after: int, unconfirmed: Sequence[str], on_lost: Callable[[int], None]
    ) -> PoolSubscription:
        """Return itself.

        :param on_lost: called with the position of a request that is to end.
        """
        self._interrupt = on_lost
        return self

    def reader(self, after: int) -> Reader:
        return _PoolReader(self, after)

    def at_tip(self) -> bool:
        return self._dry and not self.positions

    def is_held(self, position: int) -> bool:
        return position in self._held and position not in self._cancelled

    def failure(self, position: int) -> FailureRecord | None:
        request, _ = self._held[position]
        if not request.failed:
            return None
        error = request.error or ""
        return FailureRecord(position, request.failed, error, crashed=request.crashed)

    def id_of(self, position: int) -> str:
        """Return the id of a request that it holds."""
        return self._held[position][0].take.id

    def done(self, position: int) -> None:
        found = self._held.pop(position, None)
        if found is None:
            return
        reason = self._cancelled.pop(position, None)
        if reason is not None:
            self._spawn(self._end, position, found[0], "cancelled", reason)
            return
        if position in self._told:
            self._told.discard(position)
        else:
            self._done[found[0].take.id] = found[0].take.number
            self._forget(position, found[0])
        self._wake()

    def poll_now(self) -> None:
        self._dry = False

    @property
    def busy(self) -> bool:
        """Whether it holds requests."""
        return bool(self._held)

    def close(self) -> None:
        """Put back what was not started; it returns at once, see `join`."""
        self._closed = True
        held, self._held = self._held, {}
        for position, (request, _) in held.items():
            if position in self._told:
                self._forget(position, request)
            elif (reason := self._cancelled.pop(position, None)) is not None:
                self._spawn(self._end, position, request, "cancelled", reason)
            else:
                self._spawn(self._put_back, position, request, request.failed, 0.0, request.error)

    def join(self, seconds: float) -> None:
        """Wait until what `close` began is stored, at most so long."""
        gevent.joinall(self._ends, timeout=seconds)
        gevent.killall(self._ends)

    # --- taking ---

    def rows(self, after: int, limit: int) -> Sequence[Row]:
        """Return held requests behind a position, or take some."""
        rows = [row for position, (_, row) in self._held.items() if position > after][:limit]
        if rows or not self.may_start():
            return rows
        places = 0 if self._dry else min(limit, self._places(len(self._held)))
        return self._take(places) if places > 0 else []

    def look(self, due: float | None, at_once: bool = False) -> bool:
        """Look for marks of running requests, and for those of lost answers; not too often.

        :param due: when the next request of the pool is due, None without any.
        :return: whether it may be taken now.
        """
        if due is not None or self.positions:
            self._used_at = clock()
        self.idle_seconds = clock() - self._used_at
        if due is None or due > self._now():
            self.next_due, self._dry = due, True
        else:
            self.poll_now()
        if self._held and (at_once or clock() >= self._look_at):
            self._take(0)
        return not self._dry

    def _take(self, places: int) -> list[Row]:
        with self._taking:
            done, self._done = self._done, {}
            turn = self._turn + self.taken
            oldest = (turn + places) // PASSES - turn // PASSES
            running = list(self.positions)
            try:
                taken = self._store.take(self.name, self._pool, places, running, oldest)
            except BaseException:
                self._done = {**done, **self._done}
                raise
            self._look_at = clock() + MARKS_SECONDS
            if places:  # large bodies may leave requests that are due
                self.next_due = due = taken.next_due
                self._dry = len(taken.requests) < places and (due is None or due > self._now())
            takes = [each.take for each in taken.requests]
            back = {each.id for each in takes if done.get(each.id) == each.number - 1}
            twice, self._back = back & self._back, (self._back - done.keys()) | back
            rows = [row for each in taken.requests for row in self._received(each, twice)]
        for id, mark in taken.marks.items():
            if id in self.positions and "cancel" in (found := decoded_headers(mark) or {}):
                self._cancel(id, str(found["cancel"]))
        return rows

    def _received(self, request: TakenRequest, twice: set[str]) -> list[Row]:
        """Return the row of a request to run; end or put back any other.

        :param twice: ids of requests whose jobs returned twice without an end. Once, a failover may
            have lost the end, so the job runs again. Middleware that leaves out the job is called
            again, too; after that, the request is done.
        """
        position = self.taken = self.taken + 1
        self.positions[request.take.id] = position
        try:
            row = self._hold(position, request)
        except Exception as error:  # noqa: BLE001 - another program wrote it
            why = f"its row is damaged: {describe(error)}"
            self._spawn(self._end, position, request, "failed", why)
            return []
        if self._closed:  # while the answer was on its way
            del self._held[position]
            self._spawn(self._put_back, position, request, request.failed, 0.0, request.error)
        elif request.take.id in twice:
            del self._held[position]
            self._spawn(self._end, position, request, "done", None)
        else:
            return [row]
        return []

    def _hold(self, position: int, request: TakenRequest) -> Row:
        body, headers = request.content
        take, priority = request.take, request.priority
        headers = with_header(
            headers or "{}",
            qdo_id=take.id,
            qdo_take=f"{take.number} {take.owner}",
            qdo_sent=time_text(request.asked),
            qdo_priority=None if priority == NORMAL else str(priority),
            qdo_reply=request.reply,
        )
        row = (position, body, None, headers)
        self._held[position] = request, row
        return row

    def _cancel(self, id: str, reason: str) -> None:
        position = self.positions[id]
        if self.is_held(position) and position not in self._told:
            _log.info("%s, pool %s: request %s is cancelled: %s", self.name, self._pool, id, reason)
            self._cancelled[position] = reason
            if position in self.in_flight():
                self._interrupt(position)
            else:  # its lane may wait for long
                self._spawn(self._end, position, self._held[position][0], "cancelled", reason)
            self._wake()

    # --- telling the broker ---

    def put_back(self, position: int, failed: int, seconds: float, error: str | None) -> None:
        """Let a request wait again; it returns once that is stored."""
        self._told.add(position)
        self._put_back(position, self._held[position][0], failed, seconds, error)

    def finish(self, position: int, outcome: str, error: str, failed: int | None = None) -> None:
        """Record an outcome other than "done"; it returns once that is stored.

        :param failed: see `RequestStore.end`.
        """
        self._told.add(position)
        self._end(position, self._held[position][0], outcome, error, failed)

    def _put_back(
        self, position: int, request: TakenRequest, failed: int, seconds: float, error: str | None
    ) -> None:
        back = partial(self._store.put_back, request.take, failed, seconds, error)
        try:
            self._answered(request, back)
        except Exception as refusal:  # noqa: BLE001 - brokers raise what their libraries raise
            why = f"it cannot wait for another attempt: {describe(refusal)}"
            self._end(position, request, "failed", why)
        else:
            self._forget(position, request)

    def _end(
        self,
        position: int,
        request: TakenRequest,
        outcome: str,
        error: str | None,
        failed: int | None = None,
    ) -> None:
        run = partial(self._answered, request)
        asked = self._app, request.take, self._pool, request.reply
        try:
            end_request(*asked, outcome, error, run, failed)
        except Exception as refusal:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.error(
                "%s, pool %s: request %s stays running, because the broker refuses its end: %s",
                self.name,
                self._pool,
                request.take.id,
                describe(refusal),
            )
        else:
            self._forget(position, request)
        self._wake()

    def _answered(self, request: TakenRequest, call: Callable[[], bool]) -> bool:
        return until_answered(call, f"request {request.take.id} of pool {self._pool}")

    def _forget(self, position: int, request: TakenRequest) -> None:
        if self.positions.get(request.take.id) == position:
            del self.positions[request.take.id]

    def _spawn(self, function: Callable[..., None], *args: Any) -> None:
        self._ends = [each for each in self._ends if not each.ready()]
        self._ends.append(gevent.spawn(function, *args))


class _PoolReader:
    def __init__(self, subscription: PoolSubscription, after: int) -> None:
        self._subscription = subscription
        self._after = after

    def fetch(self, limit: int) -> Sequence[Row]:
        rows = self._subscription.rows(self._after, limit)
        if rows:
            self._after = rows[-1][0]
        return rows
