"""What to ask Kinesis next about one shard: a state machine without I/O and without a clock.

==========  ==================================================  =================================
step        when                                                answered with
==========  ==================================================  =================================
`Seek`      there is no iterator: at the beginning, when it     `found`: an iterator
            expired, and whenever it is not sure what became
            of a request
`Read`      there is one                                        `answered`: what is behind it
(either)    the request failed                                  `refused` when throttled, else
                                                                `doubted`
None        the shard was read to its end
==========  ==================================================  =================================

An iterator is only a short-lived handle (5 minutes): what counts is the position of the last record
that was taken. An iterator is asked for *at* that record, not behind it. So the rest of an
aggregated record is found, and that the first record is not that one says that it is gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qdo.brokers.kinesis_positions import is_end, place_of, sequence_of, time_in
from qdo.message import format_position, position_of_time, time_of_position

MOST_RECORDS = 10_000
"""What Kinesis gives at once, at most."""
FIRST_RECORDS = 1000
ANSWER_BYTES = 4 * 1024 * 1024
"""Bodies in one answer, about: the number of records asked for follows their size."""
READ_BYTES_PER_SECOND = 2 * 1024 * 1024
"""What a shard gives, to all its readers together; who takes more is refused for a while."""
BACKOFF_SECONDS = 1.0
"""Pause after the first refusal, as AWS advises; doubled with each further one."""
MAX_BACKOFF_SECONDS = 30.0
FRESH_SECONDS = 30.0
"""How long an answer says what waits now."""
SLACK_SECONDS = 5.0
"""The clock here may be ahead by this: nothing younger is asked for by its time."""
SKEW_SECONDS = 300.0
"""Nor can it be ahead by more than this: AWS refuses requests whose signature is."""

Taken = tuple[int, bytes, "str | None", "str | None"]


@dataclass(frozen=True, slots=True)
class Seek:
    """Ask for an iterator.

    :ivar kind: ShardIteratorType.
    :ivar sequence: of the record to begin at.
    :ivar time: Unix time to begin at.
    """

    kind: str
    sequence: int | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Ask for records behind an iterator, at most `limit`."""

    iterator: str
    limit: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What Kinesis said to `Read`.

    :ivar first: sequence number of the first record, None without records.
    :ivar last: position behind all messages of the last record, 0 without records.
    :ivar rows: the messages.
    :ivar records: how many records they came in.
    :ivar size: bytes of these.
    :ivar next_iterator: None at the end of a closed shard.
    :ivar behind_seconds: how far the answer is from the tip of the shard.
    """

    first: int | None
    last: int
    rows: Sequence[Taken]
    records: int
    size: int
    next_iterator: str | None
    behind_seconds: float


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a stream keeps: records of so many seconds, of none before a Unix time."""

    seconds: float
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """Where a shard begins that has no position.

    :ivar kind: oldest or latest, or a Unix time.
    :ivar inherits: the shard came out of others that are read to their end first, so that its
        newest messages are not the first ones that count.
    """

    kind: str | float = "oldest"
    inherits: bool = False

    def seek(self, now: float) -> Seek:
        """Return how to begin."""
        if isinstance(self.kind, float):
            return Seek("AT_TIMESTAMP", time=self.kind)
        if self.kind == "latest" and not self.inherits:
            # A time, not LATEST: the iterator may have to be replaced before anything came.
            return Seek("AT_TIMESTAMP", time=now - SLACK_SECONDS)
        return Seek("TRIM_HORIZON")

    def words(self) -> str:
        """Return what it begins with, for people."""
        if isinstance(self.kind, float):
            return f"the first message behind {format_position(position_of_time(self.kind))}"
        if self.inherits:
            return "its first message, for it came out of shards that are read before"
        return f"the {'newest' if self.kind == 'latest' else 'oldest'} message"


class Gone(Exception):
    """The record at which to go on is not in the stream any more."""


class ShardPoll:
    """Reading one shard behind a position.

    :param after: position of the last message taken.
    :param pause_seconds: from one read to the next.
    :param dice: gives a number from 0 to 1.
    :ivar at_tip: the last answer had all there was.
    :ivar tip_at: Unix time of the newest answer that had all there was, by the clock here.
    :ivar has_place: the shard has the record that was sought, or only later ones; None: no record
        was seen yet.
    :ivar throttled: how often a request was refused for being one too many.
    :ivar doubts: how many requests failed since the last answer, without those.
    """

    def __init__(
        self,
        after: int,
        start: Start,
        pause_seconds: float,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self.after = after
        self._start = start
        self._pause_seconds = pause_seconds
        self._dice = dice
        self._iterator: str | None = None
        self._beginning: Seek | None = None
        self._earlier = False
        self._sought: int | None = None
        self._given_up = 0
        self._limit = self._asked = FIRST_RECORDS
        self._refusals = 0
        self.doubts = 0
        self._ended = is_end(after)
        self.not_before = 0.0
        self._paused_seconds = 0.0
        self.at_tip = False
        self.has_place: bool | None = None
        self.tip_at: float | None = None
        self.throttled = 0
        self._behind: tuple[float, float] | None = None

    @property
    def ended(self) -> bool:
        """Whether the shard was read to its end."""
        return self._ended

    def next(self, now: float, most: int = MOST_RECORDS) -> Seek | Read | None:
        """Return what to ask, when `due_in` says so.

        :param now: Unix time.
        :param most: records that are wanted.
        """
        if self._ended:
            return None
        if self._iterator is not None:
            self._asked = min(self._limit, most)
            return Read(self._iterator, self._asked)
        sequence = sequence_of(self.after)
        if sequence and self.after == self._given_up:
            return Seek("TRIM_HORIZON")
        if sequence:
            self._sought = sequence
            return Seek("AT_SEQUENCE_NUMBER", sequence=sequence)
        if self.after:
            asked = time_of_position(time_in(self.after))
            if asked <= 0:  # before there was any stream
                return Seek("TRIM_HORIZON")
            # Times to come are refused; `_news` leaves out what comes from before the one asked.
            slack = SKEW_SECONDS if self._earlier else SLACK_SECONDS
            return Seek("AT_TIMESTAMP", time=min(asked, now - slack))
        if self._beginning is None:
            self._beginning = self._start.seek(now)
        return self._beginning

    def found(self, iterator: str) -> None:
        """Take the answer to `Seek`."""
        self._iterator = iterator

    def answered(self, answer: Answer, now: float) -> list[Taken]:
        """Take the answer to `Read`; return the messages that were not taken before.

        :raises Gone: it does not begin at the record that was asked for; see `accept`. Nothing of
            the answer is taken.
        """
        self._check(answer)
        if self.has_place is None and answer.first is not None:
            self.has_place = answer.first >= sequence_of(self.after)
        self._iterator = answer.next_iterator
        self._refusals = self.doubts = 0
        self._behind = answer.behind_seconds, now
        self._ended = answer.next_iterator is None
        self._pause(now, max(self._pause_seconds, answer.size / READ_BYTES_PER_SECOND))
        self.at_tip = answer.behind_seconds <= 0 and answer.records < self._asked
        if self.at_tip:
            self.tip_at = now
        if answer.records:
            each = max(1, answer.size // answer.records)
            self._limit = max(1, min(MOST_RECORDS, ANSWER_BYTES // each))
        return self._news(answer)

    def _news(self, answer: Answer) -> list[Taken]:
        self._sought = None if answer.records else self._sought
        after = self.after
        if sequence_of(after):
            rows = [row for row in answer.rows if place_of(row[0]) > place_of(after)]
            self.after = max(after, answer.last)
        else:
            rows = [row for row in answer.rows if time_in(row[0]) > after]
            # As long as nothing came, the beginning stays the time: records before it do not count.
            self.after = answer.last if rows or (not after and answer.records) else after
        return rows

    def _check(self, answer: Answer) -> None:
        sought = self._sought
        if sought is None or answer.first == sought:
            return
        # An empty answer means nothing before the tip.
        if answer.first is None and answer.behind_seconds > 0 and answer.next_iterator is not None:
            return
        raise Gone

    @property
    def complete_until(self) -> float | None:
        """The time at AWS up to which all is known to be read, None before the tip was reached.

        Kinesis dates messages by its own clock. If the one here is ahead, messages that come yet
        have earlier times than the look at the tip.
        """
        if self.tip_at is None:
            return None
        begun = self._beginning.time if self._beginning is not None else None
        return max(self.tip_at - SKEW_SECONDS, begun or 0.0)

    def finish(self) -> None:
        """Take the shard as read to its end: there is none any more."""
        self._ended = True

    def accept(self) -> None:
        """Go on with the oldest record there is, although the one sought is gone."""
        self._sought = None
        self._given_up = self.after

    def refused(self, now: float) -> float:
        """Take note that a request was throttled; return the pause in seconds."""
        self.throttled += 1
        return self._back_off(now)

    def too_early(self) -> bool:
        """Take note that the time to begin at is still to come at AWS; return whether that helps.

        The clock here is ahead. To wait until that time would pass over what comes meanwhile.
        """
        begun = self._beginning
        if self._earlier or (begun is not None and self._start.kind != "latest"):
            return False
        self._earlier = True
        if begun is not None and begun.time is not None:
            self._beginning = replace(begun, time=begun.time - SKEW_SECONDS)
        return True

    def expired(self) -> None:
        """Take note that the iterator cannot be used any more."""
        self._iterator = None

    def doubted(self, now: float) -> float:
        """Take note of a failure after which nothing is sure; return the pause in seconds."""
        self._iterator = None
        self.doubts += 1
        return self._back_off(now)

    def _back_off(self, now: float) -> float:
        most = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** min(self._refusals, 10))
        self._refusals += 1
        # From the half on: a pause that may be nothing is no pause. The rest spreads out those
        # who were refused together.
        return self._pause(now, most * (0.5 + 0.5 * self._dice()))

    def _pause(self, now: float, seconds: float) -> float:
        self.not_before = now + seconds
        self._paused_seconds = seconds
        return seconds

    def due_in(self, now: float) -> float:
        """Return in how many seconds the next request may be made.

        :param now: Unix time; when it was set back, nobody waits for the time to come again.
        """
        left = self.not_before - now
        return left if 0 < left <= self._paused_seconds else 0.0

    @property
    def refusals(self) -> int:
        """How many requests were throttled or failed since the last answer."""
        return self._refusals

    def proves_complete(self, now: float, keeping: Keeping) -> bool:
        """Return whether nothing was missed although the record of `after` is gone.

        All that arrived up to a time is known to be read; if the stream still keeps everything
        younger than that, the record was just too old: nothing was added to the shard for days.
        A stream that is younger than that time is another one of the same name.
        """
        known = max(time_of_position(time_in(self.after)), self.complete_until or 0.0)
        return keeping.since <= known and now < known + keeping.seconds

    def is_fresh(self, now: float) -> bool:
        """Return whether Kinesis answered not long ago, by a clock that was not set back since."""
        return self._behind is not None and 0 <= now - self._behind[1] < FRESH_SECONDS

    def behind_seconds(self, now: float, oldest: int | None) -> float | None:
        """Return the age of what is not processed yet.

        What Kinesis said last is about its answer, and stands still while a job runs.

        :param oldest: position of the oldest message that was taken and is not done.
        :return: seconds, 0 at the tip; None before the first answer.
        """
        if oldest is not None:
            return max(0.0, now - time_of_position(time_in(oldest)))
        if self._ended or self._behind is None:
            return 0.0 if self._ended else None
        said, at = self._behind
        return said + max(0.0, now - at)
