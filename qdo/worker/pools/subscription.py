"""Hold a worker's requests of one pool, as a subscription of its engine.

For the engine, a pool is a mailbox, and a taken request is a received message. Positions number the
takes of this worker. A worker takes requests only for free seats. Other requests wait at the
broker, and any worker may take them.

The broker may store a take whose answer does not reach the worker. So each take also returns
requests that the broker assigns to this worker but the worker does not hold.

Each held request has one `HeldRequest`, with these states:

==========  ================================================  ==========  ========================
state       event                                             next        told to the broker
==========  ================================================  ==========  ========================
TAKEN       a job's process reports the end that it stored    ENDED       -
TAKEN       an attempt ended in another way (`RequestEnds`)   ENDING      put back, or its outcome
TAKEN       cancelled, its job runs                           CANCELLED   - (its job is killed)
TAKEN       cancelled, it waits for a lane                    ENDING      end "cancelled"
TAKEN       done without a report: middleware left out the    ENDING      end "done", no result
            job
TAKEN       the claim closes                                  ENDING      put back
CANCELLED   done, or the claim closes                         ENDING      end "cancelled"
ENDING      stored                                            ENDED       -
ENDING      no answer                                         ENDING      the same, after a pause
ENDING      put back is refused                               ENDING      end "failed"
ENDING      its message is refused                            ENDING      end without the message
ENDING      the end itself is refused                         ENDING      - (logged: it stays
                                                                          this worker's)
ENDED       done, or the claim closes                         (dropped)   -
==========  ================================================  ==========  ========================

A request leaves its seat when the engine has finished it. The worker drops the record when the
state is also `ENDED`. Until then the broker assigns the request to this worker, and each take names
the request as held.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gevent
from gevent.lock import Semaphore

from qdo.brokers.base import Reader, Subscription
from qdo.brokers.request_store import RequestStore
from qdo.brokers.requests import TakenRequest
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.encoding import decoded_headers, with_header
from qdo.message import NORMAL
from qdo.requests.replies import end_request, until_answered
from qdo.sending.messages import time_text
from qdo.sending.sender import Sender
from qdo.system.clock import clock
from qdo.text import describe
from qdo.worker.engine.slot import Row

_log = logging.getLogger(__name__)

# Seconds between two checks for cancellations of running requests.
MARKS_SECONDS = 0.2
# One of this many taken requests is the oldest, of any priority. So more urgent requests cannot
# delay a request forever.
PASSES = 10


class HeldState(enum.Enum):
    """The state of a held request; see the table in the module's docstring."""

    TAKEN = "taken"
    CANCELLED = "its job is being interrupted"
    ENDING = "its end, or its return, is being stored"
    ENDED = "the broker no longer counts it as this worker's"


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request of this worker, from its take until the broker has stored its end."""

    position: int
    request: TakenRequest
    # The request as a row for the engine; None after the engine has finished the request.
    row: Row | None
    state: HeldState = HeldState.TAKEN
    # The reason for the cancellation; "" if the request is not cancelled.
    reason: str = ""

    @property
    def id(self) -> str:
        return self.request.take.id


class _Unrecorded:
    """Ignores the reports of a claim without a node."""

    def progress(self, claim: Claim) -> None:
        pass

    def record(self, claim: Claim, timeout_seconds: float | None = None) -> bool:
        return True

    def finished(self, claim: Claim) -> None:
        pass


class PoolSubscription(_Unrecorded, Subscription):
    """The requests of a pool that one registration of a worker holds.

    :ivar name: the name of the registration.
    :ivar idle_seconds: seconds for which neither the pool nor this subscription has had requests.
    :ivar taken: number of requests taken so far, which is also the position of the last taken
      request.
    :ivar next_due: Unix time at which the next request is due; None if unknown.
    :param seats: returns the number of free seats for a given number of seated requests.
    :param wake: called when a seat becomes free.
    :param now: returns the Unix time.
    :param turn: initial value of the count that selects the oldest requests; see `PASSES`. Each
      worker has another value, so even short-lived workers sometimes take the oldest request.
    """

    def __init__(
        self,
        app: Sender,
        store: RequestStore,
        pool: str,
        name: str,
        seats: Callable[[int], int],
        wake: Callable[[], None],
        now: Callable[[], float] = time.time,
        turn: int = 0,
    ) -> None:
        self.name = name
        self.is_pool = True
        self.taken = 0
        self.next_due: float | None = None
        self.idle_seconds = 0.0
        self._app = app
        self._store = store
        self._pool = pool
        self._seats = seats
        self._wake = wake
        self._now = now
        self._turn = turn
        self._interrupt: Callable[[int], None] = lambda position: None
        self._held: dict[int, HeldRequest] = {}
        self._dry = False
        self._closed = False
        self._look_at = 0.0
        self._used_at = clock()
        self._taking = Semaphore()
        self._storing: list[Any] = []

    # --- for the engine ---

    def subscribe(
        self, queue: str, after: int, unconfirmed: Sequence[str], on_lost: Callable[[int], None]
    ) -> PoolSubscription:
        """Return this object.

        :param on_lost: called with the position of a running request that must end.
        """
        self._interrupt = on_lost
        return self

    def reader(self, after: int) -> Reader:
        return _PoolReader(self._rows, after)

    def at_tip(self) -> bool:
        return self._dry and not self._held

    def is_held(self, position: int) -> bool:
        held = self._held.get(position)
        return held is not None and held.row is not None and not held.reason

    def failure(self, position: int) -> FailureRecord | None:
        request = self._held[position].request
        if not request.failed:
            return None
        error = request.error or ""
        return FailureRecord(position, request.failed, error, crashed=request.crashed)

    def id_of(self, position: int) -> str:
        """Return the id of a held request."""
        return self._held[position].id

    def reported(self, position: int) -> None:
        """Record that the job's process has stored the end of a request."""
        held = self._held.get(position)
        if held is not None and held.state is HeldState.TAKEN:
            held.state = HeldState.ENDED

    def done(self, position: int) -> None:
        held = self._held.get(position)
        if held is not None and held.row is not None:
            held.row = None
            if held.state is HeldState.TAKEN:
                # Middleware has skipped the job. As in a queue, the message is done.
                self._spawn(held, self._end, "done", None)
            self._leave(held)

    def poll_now(self) -> None:
        self._dry = False

    @property
    def running(self) -> list[str]:
        """The ids of held requests whose end the broker has not stored."""
        # The broker would return a missing request again, and the request would run twice.
        return [held.id for held in self._held.values() if held.state is not HeldState.ENDED]

    def close(self) -> None:
        """Begin to put back the requests that have not started; see `join`."""
        # Set this first, because a take in progress must then put back its requests.
        self._closed = True
        for held in list(self._held.values()):
            if held.row is not None:
                held.row = None
                if held.state is HeldState.TAKEN:
                    self._spawn(held, self._put_back_as_taken)
                self._leave(held)

    def join(self, seconds: float) -> None:
        """Wait until the broker has stored the work of `close`, for at most `seconds`."""
        gevent.joinall(self._storing, timeout=seconds)
        gevent.killall(self._storing)

    # --- taking ---

    def _seated(self) -> list[Row]:
        return [held.row for held in self._held.values() if held.row is not None]

    def _rows(self, after: int, limit: int) -> Sequence[Row]:
        """Return the seated requests after a position, or take more requests."""
        seated = self._seated()
        rows = [row for row in seated if row[0] > after][:limit]
        if rows or self._dry or not self.may_start():
            return rows
        seats = min(limit, self._seats(len(seated)))
        return self._take(seats) if seats > 0 else []

    def look(self, due: float | None, at_once: bool = False) -> bool:
        """Check for requests to take, and from time to time for cancelled running requests.

        :param due: the due time of the pool's next request; None without requests.
        :return: whether the worker may take a request now, or a request has a seat.
        """
        if due is not None or self._held:
            self._used_at = clock()
        self.idle_seconds = clock() - self._used_at
        if due is None or due > self._now():
            self.next_due = due
            self._dry = True
        else:
            self.poll_now()
        # A take for 0 seats returns only cancellation marks, and requests of lost answers.
        if self._seated() and (at_once or clock() >= self._look_at):
            self._take(0)
        return not self._dry or bool(self._seated())

    def _take(self, seats: int) -> list[Row]:
        # One take at a time. A second take would not name the requests of the first, and the broker
        # would return these requests to both.
        with self._taking:
            # Every tenth taken request is the oldest request.
            turn = self._turn + self.taken
            oldest = (turn + seats) // PASSES - turn // PASSES
            # Set this before the take, which waits for the broker. If a look during the take finds
            # a missed request, the look clears the flag.
            self._dry = self._dry or seats > 0
            try:
                taken = self._store.take(self.name, self._pool, seats, self.running, oldest)
            except BaseException:
                self.poll_now()
                raise
            self._look_at = clock() + MARKS_SECONDS
            if seats:
                self.next_due = due = taken.next_due
                # The take may have left due requests, because of large bodies.
                if len(taken.requests) == seats or (due is not None and due <= self._now()):
                    self.poll_now()
            rows = [row for request in taken.requests for row in self._received(request)]
        # Collect the held requests now, because a marked request may have ended during the take.
        by_id = {held.id: held for held in self._held.values()}
        for id, mark in taken.marks.items():
            answer = decoded_headers(mark) or {}
            if id in by_id and "cancel" in answer:
                self._cancel(by_id[id], str(answer["cancel"]))
        return rows

    def _received(self, request: TakenRequest) -> list[Row]:
        """Hold a taken request; return its row, or no row if the request must not run."""
        self.taken += 1
        held = self._held[self.taken] = HeldRequest(self.taken, request, None)
        try:
            row = self._row(held)
        except Exception as error:  # noqa: BLE001 - other programs write rows
            self._spawn(held, self._end, "failed", f"its row is damaged: {describe(error)}")
            return []
        if self._closed:  # the claim closed during the take
            self._spawn(held, self._put_back_as_taken)
            return []
        held.row = row
        return [row]

    def _row(self, held: HeldRequest) -> Row:
        request = held.request
        body, headers = request.content
        priority = request.priority
        headers = with_header(
            headers or "{}",
            qdo_id=held.id,
            qdo_take=request.take.header,
            qdo_sent=time_text(request.asked),
            qdo_priority=None if priority == NORMAL else str(priority),
            qdo_reply=request.reply,
        )
        return (held.position, body, None, headers)

    def _cancel(self, held: HeldRequest, reason: str) -> None:
        if held.row is None or held.state is not HeldState.TAKEN:
            return
        _log.info(
            "%s, pool %s: request %s is cancelled: %s", self.name, self._pool, held.id, reason
        )
        # Set the reason before the interruption, because the engine calls `is_held` when the job
        # has ended.
        held.reason = reason
        if held.position in self.in_flight():
            held.state = HeldState.CANCELLED
            self._interrupt(held.position)
        else:  # do not wait for its lane
            self._spawn(held, self._end, "cancelled", reason)
        self._wake()

    # --- telling the broker ---

    def put_back(self, position: int, failed: int, seconds: float, error: str | None) -> None:
        """Return a request to its pool; return once the broker has stored the change."""
        held = self._held[position]
        held.state = HeldState.ENDING
        self._put_back(held, failed, seconds, error)

    def finish(self, position: int, outcome: str, error: str, failed: int | None = None) -> None:
        """Record an outcome other than "done"; return once the broker has stored the outcome.

        :param failed: see `RequestStore.end`.
        """
        held = self._held[position]
        held.state = HeldState.ENDING
        self._end(held, outcome, error, failed)

    def _put_back_as_taken(self, held: HeldRequest) -> None:
        self._put_back(held, held.request.failed, 0.0, held.request.error)

    def _put_back(self, held: HeldRequest, failed: int, seconds: float, error: str | None) -> None:
        back = partial(self._store.put_back, held.request.take, failed, seconds, error)
        try:
            until_answered(back, self._what(held))
        except Exception as refusal:  # noqa: BLE001 - brokers raise what their libraries raise
            why = f"it cannot wait for another attempt: {describe(refusal)}"
            self._end(held, "failed", why)
        else:
            held.state = HeldState.ENDED
            self._leave(held)

    def _end(
        self, held: HeldRequest, outcome: str, error: str | None, failed: int | None = None
    ) -> None:
        request = held.request
        try:
            end_request(
                self._app,
                request.take,
                self._pool,
                request.reply,
                outcome,
                error,
                lambda call: until_answered(call, self._what(held)),
                failed,
            )
        except Exception as refusal:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.error(
                "%s, pool %s: request %s stays running, because the broker refuses its end: %s",
                self.name,
                self._pool,
                held.id,
                describe(refusal),
            )
        else:
            held.state = HeldState.ENDED
        self._leave(held)

    def _what(self, held: HeldRequest) -> str:
        return f"request {held.id} of pool {self._pool}"

    def _leave(self, held: HeldRequest) -> None:
        """If a request has left its seat, end or drop its record; wake the pool."""
        if held.row is None:
            if held.state is HeldState.CANCELLED:
                self._spawn(held, self._end, "cancelled", held.reason)
            elif held.state is HeldState.ENDED:
                self._held.pop(held.position, None)
        self._wake()

    def _spawn(self, held: HeldRequest, store: Callable[..., None], *args: Any) -> None:
        """Run `store`, which ends or puts back a request, in a separate greenlet."""
        held.state = HeldState.ENDING
        self._storing = [greenlet for greenlet in self._storing if not greenlet.ready()]
        self._storing.append(gevent.spawn(store, held, *args))


class _PoolReader:
    def __init__(self, rows: Callable[[int, int], Sequence[Row]], after: int) -> None:
        self._rows = rows
        self._after = after

    def fetch(self, limit: int) -> Sequence[Row]:
        rows = self._rows(self._after, limit)
        if rows:
            self._after = rows[-1][0]
        return rows
