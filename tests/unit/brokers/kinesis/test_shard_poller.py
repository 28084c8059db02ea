"""The next Kinesis request about a shard: pure decisions on answers and a clock."""

from __future__ import annotations

from typing import Any

import pytest

from qdo.brokers.kinesis.api import (
    MOST_RECORDS,
    SKEW_SECONDS,
    SLACK_SECONDS,
    GetIterator,
    GetRecords,
    Records,
    RetentionPeriod,
    StartPosition,
    Taken,
)
from qdo.brokers.kinesis.poller import ANSWER_BYTES, FIRST_RECORDS, READ_BACKOFF, ShardPoller
from qdo.brokers.kinesis.positions import POSITIONS, pack, whole
from qdo.positions import position_of_time

NOW = 1_700_000_000.0
DAY = 86_400.0


def at(sequence: int, sub: int = 0, time: float = NOW) -> int:
    return pack(sequence, sub, position_of_time(time))


def row(sequence: int, sub: int = 0, time: float = NOW) -> Taken:
    return (at(sequence, sub, time), b"%d" % sequence, None, None)


def answer(*rows: Taken, more: str | None = "next", behind: float = 0.0, size: int = 0) -> Records:
    sequences = [found[0] >> 96 for found in rows]
    return Records(
        first=sequences[0] if rows else None,
        last=whole(sequences[-1], rows[-1][0] & (2**64 - 1)) if rows else 0,
        rows=rows,
        records=len(set(sequences)),
        size=size or sum(len(found[1]) for found in rows),
        next_iterator=more,
        behind_seconds=behind,
    )


def poll(after: int = 0, start: StartPosition | None = None, **terms: Any) -> ShardPoller:
    return ShardPoller(after, start or StartPosition(), 1.0, dice=lambda: 1.0, **terms)


def reading(after: int = 0) -> ShardPoller:
    """Return a poll that has an iterator."""
    made = poll(after)
    assert isinstance(made.next(NOW), GetIterator)
    made.iterator_received("first")
    return made


# --- where to begin -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "asked"),
    [
        (StartPosition("oldest"), GetIterator("TRIM_HORIZON")),
        (StartPosition("oldest", inherits=True), GetIterator("TRIM_HORIZON")),
        (StartPosition("latest"), GetIterator("AT_TIMESTAMP", time=NOW - SLACK_SECONDS)),
        (StartPosition("latest", inherits=True), GetIterator("TRIM_HORIZON")),
        (StartPosition(123.5), GetIterator("AT_TIMESTAMP", time=123.5)),
        (StartPosition(123.5, inherits=True), GetIterator("AT_TIMESTAMP", time=123.5)),
    ],
)
def test_a_shard_without_position_begins_as_configured(
    start: StartPosition, asked: GetIterator
) -> None:
    """But a child shard never at its newest: messages before the first read are not lost."""
    assert poll(0, start).next(NOW) == asked


@pytest.mark.parametrize(
    ("start", "word"),
    [
        (StartPosition("oldest"), "oldest"),
        (StartPosition("latest"), "newest"),
        (StartPosition("latest", inherits=True), "parent shards"),
        (StartPosition(1.5), "1970-01-01T00:00:01.500000Z"),
    ],
)
def test_start_position_is_described(start: StartPosition, word: str) -> None:
    """The log contains it, because it may surprise operators."""
    assert word in start.words()


def test_the_newest_stays_where_it_was_at_first() -> None:
    """A second iterator, before anything came, leaves no gap."""
    made = poll(0, StartPosition("latest"))
    first = made.next(NOW)
    made.iterator_received("one")
    made.iterator_expired()
    assert made.next(NOW + 400) == first


def test_a_time_to_come_is_asked_for_once() -> None:
    """For the newest, an earlier time is requested then; any other rejection is an error."""
    made = poll(0, StartPosition("latest"))
    made.next(NOW)
    assert made.timestamp_rejected()
    assert made.next(NOW + 1) == GetIterator(
        "AT_TIMESTAMP", time=NOW - SLACK_SECONDS - SKEW_SECONDS
    )
    assert not made.timestamp_rejected()
    for start in (StartPosition("oldest"), StartPosition(4e9)):
        other = poll(0, start)
        other.next(NOW)
        assert not other.timestamp_rejected()


def test_the_start_does_not_matter_where_there_is_a_position() -> None:
    """Neither by a sequence number nor by a time that an operator sought."""
    for start in (StartPosition("latest"), StartPosition(5.0)):
        assert poll(at(7), start).next(NOW) == GetIterator("AT_SEQUENCE_NUMBER", sequence=7)
        sought = position_of_time(NOW - 1000)
        assert poll(sought, start).next(NOW) == GetIterator("AT_TIMESTAMP", time=NOW - 1000)


def test_the_earliest_is_the_oldest_record_whatever_the_start() -> None:
    """An operator wants the existing messages; the configured start is for new shards."""
    after = POSITIONS.resume_after(POSITIONS.earliest, None)
    assert poll(after, StartPosition("latest")).next(NOW) == GetIterator("TRIM_HORIZON")


def test_no_time_to_come_is_asked_for() -> None:
    """AWS rejects these, and the clock here may be ahead; messages that are too old are omitted."""
    made = poll(position_of_time(NOW))
    assert made.next(NOW) == GetIterator("AT_TIMESTAMP", time=NOW - SLACK_SECONDS)
    assert made.timestamp_rejected()
    assert made.next(NOW) == GetIterator("AT_TIMESTAMP", time=NOW - SKEW_SECONDS)
    assert not made.timestamp_rejected()
    made.iterator_received("one")
    rows = [row(1, time=NOW - 2), row(2, time=NOW + 1), row(3, time=NOW - 1)]
    assert made.records_received(answer(*rows), NOW) == [row(2, time=NOW + 1)]
    assert made.records_received(answer(row(4, time=NOW - 1)), NOW) == [row(4, time=NOW - 1)]


def test_a_time_stays_the_beginning_until_something_is_taken() -> None:
    """Records from before it do not become the position."""
    made = poll(position_of_time(NOW - 500))
    made.next(NOW)
    made.iterator_received("one")
    assert made.records_received(answer(row(1, time=NOW - 600)), NOW) == []
    made.iterator_expired()
    assert made.next(NOW) == GetIterator("AT_TIMESTAMP", time=NOW - 500)


# --- reading on ---------------------------------------------------------------------


def test_reads_follow_each_other_at_the_configured_rate() -> None:
    """Each with the iterator of the answer before."""
    made = reading()
    assert made.next(NOW) == GetRecords("first", FIRST_RECORDS)
    assert made.records_received(answer(row(1), row(2), more="second"), NOW) == [row(1), row(2)]
    assert made.not_before == NOW + 1.0
    assert made.next(NOW + 1) == GetRecords("second", MOST_RECORDS)


def test_a_clock_that_is_set_back_stops_nobody() -> None:
    """No pause is longer than it was meant to be."""
    made = reading()
    made.records_received(answer(), NOW)
    assert made.due_in(NOW + 0.25) == 0.75
    assert made.due_in(NOW + 1) == 0
    assert made.due_in(NOW - 3600) == 0


def test_an_empty_answer_is_not_the_tip() -> None:
    """Only one that is not behind is; the next read comes at the read rate, not later."""
    made = reading()
    made.records_received(answer(behind=3600.0, more="second"), NOW)
    assert not made.tip.reached
    assert made.not_before == NOW + 1.0
    made.records_received(answer(more="third"), NOW + 1)
    assert made.tip.reached
    assert made.not_before == NOW + 2.0


def test_a_full_answer_is_not_the_tip() -> None:
    """Whatever lag it reports: there may be more at the same millisecond."""
    made = reading()
    rows = [row(number) for number in range(1, FIRST_RECORDS + 1)]
    made.records_received(answer(*rows, behind=0.0), NOW)
    assert not made.tip.reached


def test_who_wants_few_records_asks_for_few() -> None:
    """As many as were asked for may not be all."""
    made = reading()
    assert made.next(NOW, 2) == GetRecords("first", 2)
    made.records_received(answer(row(1), row(2)), NOW)
    assert not made.tip.reached
    assert made.next(NOW, 2) == GetRecords("next", 2)
    made.records_received(answer(row(3)), NOW)
    assert made.tip.reached


@pytest.mark.parametrize(
    ("each", "limit"), [(1, MOST_RECORDS), (10_000, ANSWER_BYTES // 10_000), (9_000_000, 1)]
)
def test_large_records_are_asked_for_in_small_numbers(each: int, limit: int) -> None:
    """The messages in memory stay bounded."""
    made = reading()
    made.records_received(answer(row(1), row(2), size=2 * each), NOW)
    assert made.next(NOW + 60) == GetRecords("next", limit)


def test_what_a_shard_cannot_give_is_not_asked_for() -> None:
    """After an answer of 10 MiB AWS rejects all reads for five seconds."""
    made = reading()
    made.records_received(answer(row(1), size=10 * 1024 * 1024), NOW)
    assert made.not_before == NOW + 5.0


# --- iterators ----------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["expired", "doubted"])
def test_a_new_iterator_begins_at_the_last_record_taken(trouble: str) -> None:
    """Its messages that were already returned are not taken again, the rest is."""
    made = reading()
    made.records_received(answer(row(5), row(6)), NOW)
    made.iterator_expired() if trouble == "expired" else made.call_failed(NOW)
    assert made.next(NOW) == GetIterator("AT_SEQUENCE_NUMBER", sequence=6)
    made.iterator_received("again")
    assert made.records_received(answer(row(6), row(7)), NOW) == [row(7)]


def test_throttling_keeps_the_iterator_and_slows_down() -> None:
    """Pauses double up to a limit, and restart at the first one after an answer."""
    made = reading()
    pauses = [made.call_throttled(NOW) for _ in range(8)]
    assert pauses == [1, 2, 4, 8, 16, *[READ_BACKOFF.max_seconds] * 3]
    assert made.throttled == 8
    assert made.next(NOW) == GetRecords("first", FIRST_RECORDS)
    made.records_received(answer(), NOW)
    assert made.call_throttled(NOW) == 1


def test_pauses_are_spread_out() -> None:
    """Readers that were throttled together do not retry together."""
    calm = ShardPoller(0, StartPosition(), 1.0, dice=lambda: 0.0)
    assert calm.call_throttled(NOW) == 0.5
    assert calm.not_before == NOW + 0.5


# --- records that are gone ----------------------------------------------------------


def test_a_shard_that_was_read_to_its_tip_lost_nothing() -> None:
    """Its last record has expired; messages that came after the look at the tip have not."""
    made = poll(at(5, time=NOW - 10 * DAY))
    assert not made.proves_complete(NOW, RetentionPeriod(DAY))
    made.iterator_received("one")
    made.records_received(answer(row(5, time=NOW - 10 * DAY)), NOW - 100)
    assert made.tip.reached
    assert made.proves_complete(NOW, RetentionPeriod(DAY))
    assert not made.proves_complete(NOW + DAY, RetentionPeriod(DAY))


def test_a_young_position_lost_nothing() -> None:
    """Whatever became of its record: all behind it is kept."""
    assert poll(at(5, time=NOW - 100)).proves_complete(NOW, RetentionPeriod(DAY))


def test_resume_at_oldest_without_an_iterator() -> None:
    """The position itself was rejected."""
    made = poll(at(5))
    made.next(NOW)
    made.resume_at_oldest()
    assert made.next(NOW) == GetIterator("TRIM_HORIZON")


# --- lag ----------------------------------------------------------------------------


def test_lag_without_messages_grows_since_the_last_response() -> None:
    """It does not freeze when the shard is not read."""
    made = reading()
    assert made.behind_seconds(NOW, None) is None
    made.records_received(answer(behind=20.0), NOW)
    assert made.behind_seconds(NOW + 5, None) == pytest.approx(25)
    made.records_received(answer(), NOW + 6)
    assert made.behind_seconds(NOW + 6, None) == 0


def test_an_answer_is_fresh_for_a_while() -> None:
    """And not for hours where the clock was set back."""
    made = reading()
    made.records_received(answer(), NOW)
    assert made.tip.is_fresh(NOW + 1)
    assert not made.tip.is_fresh(NOW + 60)
    assert not made.tip.is_fresh(NOW - 3600)


def test_a_shard_at_its_end_has_no_lag() -> None:
    """Nothing can come any more."""
    made = reading()
    made.records_received(answer(row(1), more=None), NOW)
    assert made.behind_seconds(NOW + 500, None) == 0
