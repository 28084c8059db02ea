"""Counts the outcomes of attempts and records the owners of queues, for the history's thread.

The event loop counts, and the thread reads the counts. Neither waits for the other, because counts
only grow, and the thread reads a whole list of counts in one step. The thread reads a missed count
a second later.

`OwnerRows` records the owner of each queue and the duration of its claim. The event loop only
appends rows, which takes 15 ms for the claims and ends of 10,000 queues. The thread takes the rows
in parts, so a large handover delays neither claims nor messages.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qdo.message import Batch, Message
from qdo.outcomes import OutcomeName

# Maximum number of owner rows (20 MiB) to keep while the database is unavailable. A worker claims
# many queues at once, and each queue has a row for its claim and a row for its end.
MAX_KEPT_OWNERS = 100_000
# Maximum number of rows of each other table to keep while the database is unavailable.
MAX_KEPT = 10_000
# Maximum number of characters of an error in a row.
MAX_TEXT = 1000
# Upper bounds, in seconds, of all classes of durations except the last: 0.1 ms, 0.3 ms, ... 478 s.
BOUNDS = tuple(0.0001 * 3.0**index for index in range(15))
BUCKETS = len(BOUNDS) + 1
# Indexes of the counts of a queue. The counts of the classes of durations follow.
FAILED, RETRIED, DEAD_LETTERED, BUSY, FIRST_BUCKET = range(5)
SIZE = FIRST_BUCKET + BUCKETS
# An attempt that returned after this time gets a separate row.
SLOW_SECONDS = 10.0

Counts = list[float]
_Call = Callable[[Any, Any], None]
_FAILURES = {"retry": RETRIED, "dead-letter": DEAD_LETTERED, "block": FAILED}
_SHORT = BOUNDS[0]


class OwnerRow(NamedTuple):
    """A claim of a queue, with Unix times. `ended` and `why` are None for an open claim."""

    # A tuple, because creating a dataclass takes three times as long.
    queue: str
    fence: int
    owner: str
    claimed: float
    ended: float | None = None
    why: str | None = None


class OwnerRows:
    """The claims of one worker process, and their ends. The thread removes `pending` rows."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.pending: deque[OwnerRow] = deque()
        self.dropped = 0
        self._now = now
        self._lasting: dict[str, OwnerRow] = {}

    def claimed(self, queue: str, fence: int, owner: str) -> None:
        row = self._lasting[queue] = OwnerRow(queue, fence, owner, self._now())
        self._add(row)

    def ended(self, queue: str, fence: int, why: str) -> None:
        """Record the end of a claim. Ignore a claim that ended before a message could start."""
        row = self._lasting.get(queue)
        if row is not None and row.fence == fence:
            del self._lasting[queue]
            self._add(OwnerRow(queue, fence, row.owner, row.claimed, self._now(), why))

    def _add(self, row: OwnerRow) -> None:
        if len(self.pending) < MAX_KEPT_OWNERS:
            self.pending.append(row)
        else:
            self.dropped += 1


def bucket_of(seconds: float) -> int:
    return bisect_right(BOUNDS, seconds)


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return a duration in seconds that this share of attempts did not exceed, or None.

    The result is the upper bound of a class, so it is at most three times too large.
    """
    attempts = share * sum(counts)
    if not attempts:
        return None
    reached = 0
    for bound, count in zip(BOUNDS, counts, strict=False):
        reached += count
        if reached >= attempts:
            return bound
    return BOUNDS[-1]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """An attempt that gets a separate row, with the Unix time of its end."""

    queue: str
    id: str
    attempt: int
    outcome: str
    error: str | None
    # Duration of the job in seconds, or None if the job did not run.
    seconds: float | None
    at: float


@dataclass(frozen=True, slots=True)
class RecordedAction:
    """An entry of the action log. The changed values are JSON texts or None."""

    id: str
    at: float
    by: str
    account: str
    command: str
    target: str
    before: str | None
    after: str | None
    reason: str


class Recorder:
    """The counts of a worker process. The writing thread removes rows and idle queues.

    :ivar counts: totals of each queue since the queue was first seen.
    :ivar runs: attempts for separate rows, oldest first.
    :param recorded: returns the text to record for an error.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
        recorded: Callable[[str], str] = str,
    ) -> None:
        self.counts: dict[str, Counts] = {}
        self.runs: deque[RecordedRun] = deque()
        self.actions: deque[RecordedAction] = deque()
        self.owners = OwnerRows(now)
        self.dropped_runs = 0
        self._clock = clock
        self._now = now
        self._recorded = recorded
        self._failed_after: dict[tuple[str, int], float] = {}
        self._batches: dict[str, float] = {}

    def bind(self, call: _Call) -> _Call:
        # Bind the attributes to local names, because `counted` runs for each message.
        clock = self._clock
        all_counts = self.counts
        new = self._new
        longer = self._longer
        failed = self._failed

        def counted(message: Message, context: Any) -> None:
            began = clock()
            try:
                call(message, context)
            except BaseException:
                failed(message, clock() - began)
                raise
            seconds = clock() - began
            try:
                counts = all_counts[message.queue]
            except KeyError:
                counts = new(message.queue)
            counts[BUSY] += seconds
            if seconds < _SHORT:
                counts[FIRST_BUCKET] += 1
            else:
                longer(counts, message, seconds)

        return counted

    def bind_batch(self, call: _Call) -> _Call:
        """Return a call that measures a batch. `batch_done` counts the messages of the batch."""
        clock = self._clock
        batches = self._batches

        def measured(batch: Batch, context: Any) -> None:
            began = clock()
            try:
                call(batch, context)
            except BaseException:
                if len(batch) == 1:
                    self._failed(batch[0], clock() - began)
                raise
            finally:
                if len(batches) >= MAX_KEPT:  # from lanes, which count separately
                    batches.clear()
                batches[batch[0].queue] = clock() - began

        return measured

    def batch_done(self, messages: list[Message]) -> None:
        """Count the messages of a queue's last batch. Each gets a share of the duration."""
        queue = messages[0].queue
        each = self._batches.pop(queue, 0.0) / len(messages)
        counts = self._counts_of(queue)
        for message in messages:
            counts[BUSY] += each
            self._longer(counts, message, each)

    def ended(self, message: Message, outcome: OutcomeName, error: str | None) -> None:
        """Count an attempt whose job did not return."""
        seconds = self._failed_after.pop((message.queue, message.position), None)
        counted = _FAILURES.get(outcome)
        if counted is None:
            return  # this outcome does not count, or the job skipped the message
        counts = self._counts_of(message.queue)
        counts[FAILED] += 1
        if counted != FAILED:
            counts[counted] += 1
        if seconds is not None:
            counts[BUSY] += seconds
        text = None if error is None else self._recorded(error)[:MAX_TEXT]
        self._add_run(message, outcome, text, seconds)

    def _failed(self, message: Message, seconds: float) -> None:
        if len(self._failed_after) >= MAX_KEPT:  # of attempts that ended without an outcome
            self._failed_after.clear()
        self._failed_after[message.queue, message.position] = seconds

    def _longer(self, counts: Counts, message: Message, seconds: float) -> None:
        counts[FIRST_BUCKET + bucket_of(seconds)] += 1
        if seconds >= SLOW_SECONDS:
            self._add_run(message, "done", None, seconds)

    def _add_run(
        self, message: Message, outcome: str, error: str | None, seconds: float | None
    ) -> None:
        if len(self.runs) >= MAX_KEPT:
            self.dropped_runs += 1
            return
        self.runs.append(
            RecordedRun(
                message.queue, message.id, message.attempt, outcome, error, seconds, self._now()
            )
        )

    def _counts_of(self, queue: str) -> Counts:
        counts = self.counts.get(queue)
        return self._new(queue) if counts is None else counts

    def _new(self, queue: str) -> Counts:
        counts: Counts = [0.0] * SIZE
        self.counts[queue] = counts
        return counts
