"""Reads a shard for its owner: a greenlet buffers messages, and the owner fetches them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from qdo.brokers.base import Subscription
from qdo.brokers.catalog import Backlog
from qdo.brokers.kinesis.api import MOST_RECORDS, GetRecords, ShardReadLimiter, Taken
from qdo.brokers.kinesis.poller import ANSWER_BYTES, ShardPoller
from qdo.brokers.kinesis.positions import at_time, end, time_in
from qdo.brokers.kinesis.reader import PrefetchBuffer, ShardReader
from qdo.positions import position_of_time

log = logging.getLogger(__name__)

# If the buffer is below both limits when the owner fetches, the greenlet requests more records.
AHEAD_BYTES = ANSWER_BYTES // 2
AHEAD_MESSAGES = MOST_RECORDS // 2
# The interval in which the owner records progress through a shard without messages.
TIP_SECONDS = 900.0

Begin = Callable[[int], ShardReader]


class KinesisSubscription(Subscription):
    """Gives the messages of one shard to its owner.

    :param begin: a function that returns a reader of the shard after a position, and may make
        calls.
    :param wake: a function that the greenlet calls when there are new messages to fetch.
    :param ended: a function that the greenlet calls after its last call of Kinesis.
    :param clock: a function that returns the Unix time.
    """

    def __init__(
        self,
        shard: str,
        after: int,
        begin: Begin,
        limiter: ShardReadLimiter,
        wake: Callable[[], None],
        ended: Callable[[KinesisSubscription], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shard = shard
        self._begin = begin
        self._limiter = limiter
        self._wake = wake
        self._ended = ended
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._restart(after)

    def _restart(self, after: int) -> None:
        """Begin after a position, and drop all buffered messages; call this with the lock held."""
        self._after = after
        self._buffer = PrefetchBuffer(after)
        self._reader: ShardReader | None = None
        self._wanted = self._reached = False
        self._failure: Exception | None = None
        self.end = self.fetched_through = None

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self._run, name=f"qdo-kinesis-{self._shard}", daemon=True
        )
        self._thread.start()

    # --- called by the owner ---

    def reader(self, after: int) -> KinesisSubscription:
        with self._lock:
            # Keep `fetched_through`, which is valid again after the owner has fetched the whole
            # buffer.
            self.end = None
            if not self._buffer.rewind(after):
                self._restart(after)
        return self

    def fetch(self, limit: int) -> list[Taken]:
        """Return buffered messages, or raise the error of a read; request more if few are left."""
        with self._lock:
            rows = self._buffer.take(limit)
            failure = None if rows else self._failure
            if failure is not None:
                self._failure = None
            self._update_end()
            read_more = self.end is None and failure is None and not self._is_enough()
            self._wanted = self._wanted or read_more
        if read_more:
            self._work.set()
        if failure is not None:
            raise failure
        return rows

    def at_tip(self) -> bool:
        with self._lock:
            return self._reached and not self._buffer.waiting

    def done(self, position: int) -> None:
        with self._lock:
            self._buffer.done(position)

    def done_through(self, position: int) -> None:
        with self._lock:
            self._buffer.done_through(position)

    def backlog(self, after: int) -> Backlog | None:
        """Return the backlog after a position; None if only Kinesis can tell the backlog."""
        with self._lock:
            reader = self._reader
            now = self._clock()
            if reader is None or not reader.poll.tip.is_fresh(now):
                return None
            if not self._buffer.reaches(after):
                return None
            return reader.backlog(self._buffer.behind(after), now)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._work.set()
        self._limiter.forget(self._shard)

    def join(self, timeout_seconds: float) -> bool:
        """Wait until the last call has ended; return False on a timeout."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            return not self._thread.is_alive()
        return True

    # --- on the thread that reads ---

    def _run(self) -> None:
        try:
            while not self._closed:
                pause = self.step()
                if pause is None or pause > 0:
                    self._work.wait(pause)
        finally:
            self._ended(self)

    def step(self) -> float | None:
        """Make the next call if necessary and due; return the seconds until the next step."""
        # The result None means to wait until the owner needs more messages.
        self._work.clear()
        with self._lock:
            wanted = self._wanted and not self._closed
            buffer = self._buffer
            after = self._after
            reader = self._reader
        if not wanted:
            return None
        try:
            return self._call(buffer, reader or self._started(buffer, after))
        except Exception as error:  # noqa: BLE001 - `fetch` raises it
            self._failed(buffer, error)
            return None

    def _started(self, buffer: PrefetchBuffer, after: int) -> ShardReader:
        reader = self._begin(after)
        with self._lock:
            if buffer is self._buffer:
                self._reader = reader
        return reader

    def _call(self, buffer: PrefetchBuffer, reader: ShardReader) -> float | None:
        poll = reader.poll
        now = self._clock()
        if pause := poll.due_in(now):
            return pause
        call = poll.next(now)
        if call is None:
            return self._received(buffer, poll, [])
        if isinstance(call, GetRecords) and (pause := self._limiter.wait(self._shard, now)):
            return pause
        rows = reader.step(call, self._clock())
        return self._received(buffer, poll, rows)

    def _received(
        self, buffer: PrefetchBuffer, poll: ShardPoller, rows: list[Taken]
    ) -> float | None:
        """Add messages to the buffer; return the seconds until the next call."""
        with self._lock:
            if buffer is not self._buffer:
                return 0.0  # the owner moved to another position
            buffer.add(rows)
            # Update this with the buffer, because `poll` processes a response earlier.
            self._reached = poll.tip.reached or poll.ended
            self._update_end()
            if rows or poll.ended:
                self._wanted = False
            wanted = self._wanted
            changed = bool(rows) or poll.ended or self._update_tip(poll)
        if changed:
            self._wake()
        return poll.due_in(self._clock()) if wanted else None

    def _update_tip(self, poll: ShardPoller) -> bool:
        """Advance `fetched_through` at the tip, at most every `TIP_SECONDS`; hold the lock."""
        # A queue without messages needs a recorded time. Without a recorded time, a new owner would
        # begin at the configured start again, which may mean a later time by then. When Kinesis
        # deletes an old record at the recorded position, messages would seem to be lost.
        complete_until = poll.complete_until
        if not poll.tip.reached or complete_until is None or self._buffer.waiting:
            return False
        buffer = self._buffer
        known = max(time_in(buffer.newest()), time_in(buffer.tip))
        tip = position_of_time(complete_until)
        if known and tip < known + TIP_SECONDS * 10_000_000:
            return False
        buffer.tip = self.fetched_through = at_time(buffer.newest(), tip)
        return True

    def _failed(self, buffer: PrefetchBuffer, error: Exception) -> None:
        with self._lock:
            if buffer is not self._buffer:
                return
            self._failure = error
            self._wanted = False
        self._wake()

    def _update_end(self) -> None:
        """Set `end` if the owner has fetched the whole shard; call this with the lock held."""
        reader = self._reader
        if reader is not None and reader.poll.ended and not self._buffer.waiting:
            self.end = end(time_in(reader.poll.after))

    def _is_enough(self) -> bool:
        buffer = self._buffer
        return buffer.waiting >= AHEAD_MESSAGES or buffer.waiting_bytes >= AHEAD_BYTES
