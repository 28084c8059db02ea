"""Decide the next call for one shard, with a state machine that has no I/O and no clock.

==============  ================================================  ==============================
call            when                                              answered with
==============  ================================================  ==============================
`GetIterator`   there is no iterator: at the start, when it       `iterator_received`
                expired, and after a call whose outcome is
                unknown
`GetRecords`    there is an iterator                              `records_received`
(either)        the call failed                                   `call_throttled`,
                                                                  `timestamp_rejected`,
                                                                  `iterator_expired`, or else
                                                                  `call_failed`
None            the shard was read to its end
==============  ================================================  ==============================

An iterator is only a handle that is valid for 5 minutes. The poller's state is the position of the
last message that it took. A new iterator begins *at* the record of this message, to find the rest
of an aggregated record. If Kinesis returns another record first, the sought record is gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from qdo.backoff import Backoff
from qdo.brokers.kinesis.api import (
    ANSWER_COST,
    MOST_RECORDS,
    ClockSkew,
    GetIterator,
    GetRecords,
    PositionTrimmed,
    Records,
    RetentionPeriod,
    StartPosition,
    Taken,
)
from qdo.brokers.kinesis.positions import index_in_record, is_end, sequence_of, time_in
from qdo.positions import time_of_position

# The time for which a response describes the current backlog.
FRESH_SECONDS = 30.0
FIRST_RECORDS = 1000
# The desired size of a response. The poller requests fewer records if records are large.
ANSWER_BYTES = 4 * 1024 * 1024
# The maximum read rate of a shard for all readers together; Kinesis throttles faster reads.
READ_BYTES_PER_SECOND = 2 * 1024 * 1024
# The delays after throttled reads; AWS recommends a first delay of 1 s.
READ_BACKOFF = Backoff(1.0, 30.0)


class ShardTip:
    """The distance from the tip of a shard. Times are Unix times by the local clock.

    :ivar reached: whether the last response contained all records up to the tip.
    :ivar reached_at: the time of the last response that reached the tip; None before the first.
    """

    def __init__(self) -> None:
        self.reached = False
        self.reached_at: float | None = None
        self._behind: tuple[float, float] | None = None

    def records_received(self, response: Records, limit: int, now: float) -> None:
        """Update the distance, given the response to a call for at most `limit` records."""
        self._behind = response.behind_seconds, now
        complete = response.records < limit and not response.cut
        self.reached = response.behind_seconds <= 0 and complete
        if self.reached:
            self.reached_at = now

    def complete_until(self, start_time: float | None) -> float | None:
        """Return the AWS time up to which the poller has read all records; None before the tip."""
        if self.reached_at is None:
            return None
        return max(ClockSkew.complete_until(self.reached_at), start_time or 0.0)

    def is_fresh(self, now: float) -> bool:
        """Return whether the last response is recent by a clock that was not set back."""
        return self._behind is not None and 0 <= now - self._behind[1] < FRESH_SECONDS

    def behind_seconds(self, now: float) -> float | None:
        """Return the distance from the tip; None before the first response."""
        # The distance grows with the age of the response, for example while a job runs.
        if self._behind is None:
            return None
        seconds, received_at = self._behind
        return seconds + max(0.0, now - received_at)


class ShardPoller:
    """Decides how to read one shard after a position.

    :param after: the position of the last message that the poller took.
    :param pause_seconds: the time between two reads.
    :param dice: a function that returns a random number from 0 to 1.
    :ivar ended: whether the poller has read the shard to its end.
    :ivar has_position: whether the shard still has the record at `after`; None before the first
        record.
    :ivar throttled: the number of throttled calls.
    :ivar failures: the number of failed calls since the last response, without throttled calls.
    :ivar consecutive_errors: the same number with throttled calls.
    """

    def __init__(
        self,
        after: int,
        start: StartPosition,
        pause_seconds: float,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self.after = after
        self.tip = ShardTip()
        self.has_position: bool | None = None
        self.throttled = 0
        self.failures = 0
        self.consecutive_errors = 0
        self.not_before = 0.0
        self._start = start
        self._pause_seconds = pause_seconds
        self._dice = dice
        self._skew = ClockSkew()
        self._iterator: str | None = None
        self._beginning: GetIterator | None = None
        self._sought: int | None = None
        self._trimmed_position = 0
        self._record_limit = self._asked_for = FIRST_RECORDS
        self.ended = is_end(after)
        self._paused_seconds = 0.0

    def next(self, now: float, most: int = MOST_RECORDS) -> GetIterator | GetRecords | None:
        """Return the next call for at most `most` records; make it when `due_in` returns 0."""
        if self.ended:
            return None
        if self._iterator is not None:
            self._asked_for = min(self._record_limit, most)
            return GetRecords(self._iterator, self._asked_for)
        sequence = sequence_of(self.after)
        if sequence and self.after == self._trimmed_position:
            return GetIterator("TRIM_HORIZON")
        if sequence:
            self._sought = sequence
            return GetIterator("AT_SEQUENCE_NUMBER", sequence=sequence)
        if self.after:
            time = time_of_position(time_in(self.after))
            if time <= 0:  # before any stream existed
                return GetIterator("TRIM_HORIZON")
            # Kinesis rejects times in the future. `_new_rows` drops messages before `time`.
            return GetIterator("AT_TIMESTAMP", time=min(time, now - self._skew.slack_seconds))
        if self._beginning is None:
            self._beginning = self._start.seek(now)
        return self._beginning

    def iterator_received(self, iterator: str) -> None:
        self._iterator = iterator

    def records_received(self, answer: Records, now: float) -> list[Taken]:
        """Process the response to `GetRecords`; return the new messages.

        :raises PositionTrimmed: the response does not begin with the requested record; see
            `resume_at_oldest`. The poller takes no message of the response.
        """
        self._check_first(answer)
        if self.has_position is None and answer.first is not None:
            self.has_position = answer.first >= sequence_of(self.after)
        self._iterator = None if answer.cut else answer.next_iterator
        self.consecutive_errors = self.failures = 0
        self.tip.records_received(answer, self._asked_for, now)
        self.ended = answer.next_iterator is None and not answer.cut
        self._pause(now, max(self._pause_seconds, answer.size / READ_BYTES_PER_SECOND))
        if answer.records:
            by_size = ANSWER_BYTES // max(1, answer.size // answer.records)
            by_cost = ANSWER_COST // max(1, answer.record_cost)
            self._record_limit = max(1, min(MOST_RECORDS, by_size, by_cost))
        return self._new_rows(answer)

    def _new_rows(self, answer: Records) -> list[Taken]:
        self._sought = None if answer.records else self._sought
        after = self.after
        if sequence_of(after):
            rows = [row for row in answer.rows if index_in_record(row[0]) > index_in_record(after)]
            self.after = max(after, answer.last)
        else:
            rows = [row for row in answer.rows if time_in(row[0]) > after]
            # Before the first new message, the poller reads from a time, and ignores earlier
            # records.
            begun = rows or answer.cut or (not after and answer.records)
            self.after = answer.last if begun else after
        return rows

    def _check_first(self, answer: Records) -> None:
        sought = self._sought
        if sought is None or answer.first == sought:
            return
        # An empty response proves that the record is gone only if the response reached the tip.
        if answer.first is None and answer.behind_seconds > 0 and answer.next_iterator is not None:
            return
        raise PositionTrimmed

    @property
    def complete_until(self) -> float | None:
        return self.tip.complete_until(None if self._beginning is None else self._beginning.time)

    def proves_complete(self, now: float, retention: RetentionPeriod) -> bool:
        """Return whether no message was missed, although the record at `after` is gone."""
        # The poller has read all records up to a known time. If the stream still keeps all later
        # records, then the record at `after` has only expired after days without new messages. A
        # stream that was created after the known time is a different stream with the same name.
        known = max(time_of_position(time_in(self.after)), self.complete_until or 0.0)
        return retention.since <= known and now < known + retention.seconds

    def behind_seconds(self, now: float, oldest: int | None) -> float | None:
        """Return the age of the oldest unfinished message; None if it is unknown."""
        # `oldest` is the position of the oldest message that is taken but not finished.
        if oldest is not None:
            return max(0.0, now - time_of_position(time_in(oldest)))
        return 0.0 if self.ended else self.tip.behind_seconds(now)

    def call_throttled(self, now: float) -> float:
        """Back off after a throttled call; return the delay in seconds."""
        self.throttled += 1
        return self._back_off(now)

    def call_failed(self, now: float) -> float:
        """Back off after a call whose outcome is unknown; return the delay in seconds."""
        self._iterator = None
        self.failures += 1
        return self._back_off(now)

    def iterator_expired(self) -> None:
        self._iterator = None

    def timestamp_rejected(self) -> bool:
        """Begin earlier, if Kinesis may have rejected a future time; return if this can help."""
        # The local clock is ahead. If the poller waited until its start time at Kinesis, it would
        # skip the messages that arrive meanwhile.
        beginning = self._beginning
        if beginning is not None and self._start.kind != "latest":
            return False
        if not self._skew.timestamp_rejected():
            return False
        if beginning is not None and beginning.time is not None:
            earlier = beginning.time - self._skew.slack_seconds
            self._beginning = replace(beginning, time=earlier)
        return True

    def resume_at_oldest(self) -> None:
        """Continue with the oldest record, because the record at `after` is gone."""
        self._sought = None
        self._trimmed_position = self.after

    def finish(self) -> None:
        """Treat the shard as ended, because it no longer exists."""
        self.ended = True

    def due_in(self, now: float) -> float:
        """Return the seconds from `now`, a Unix time, until the poller may make the next call."""
        # If an operator has set the clock back, do not wait at all.
        left = self.not_before - now
        return left if 0 < left <= self._paused_seconds else 0.0

    def _back_off(self, now: float) -> float:
        self.consecutive_errors += 1
        return self._pause(now, READ_BACKOFF.delay(self.consecutive_errors, self._dice()))

    def _pause(self, now: float, seconds: float) -> float:
        self.not_before = now + seconds
        self._paused_seconds = seconds
        return seconds
