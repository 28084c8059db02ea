"""The meaning of the positions of Kinesis records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.brokers.kinesis.positions import (
    END_SEQUENCE,
    FINISHED,
    POSITIONS,
    end,
    is_end,
    pack,
    sequence_of,
    time_in,
)
from qdo.positions import position_now

SEQUENCES = st.integers(1, END_SEQUENCE - 1)
SUBSEQUENCES = st.integers(0, 2**32 - 1)
TIMES = st.integers(1, 2**60 - 1)
LONG = 49590338271490256608559692538361571095921575989136588898


@given(SEQUENCES, SUBSEQUENCES, TIMES)
def test_what_is_recorded_brings_the_position_back(sequence: int, sub: int, time: int) -> None:
    """`last` and `position` in the queue node are the whole of it."""
    position = pack(sequence, sub, time)
    text = POSITIONS.to_text(position)
    assert POSITIONS.resume_after(POSITIONS.to_time(position), text) == position
    assert (sequence_of(position), time_in(position)) == (sequence, time)


@given(
    st.tuples(SEQUENCES, SUBSEQUENCES, TIMES),
    st.tuples(SEQUENCES, SUBSEQUENCES, TIMES),
)
def test_positions_compare_as_sequence_numbers_do(
    one: tuple[int, int, int], two: tuple[int, int, int]
) -> None:
    """By value, not as texts, then by the place in an aggregated record, whatever the time."""
    if one[:2] != two[:2]:
        assert (pack(*one) < pack(*two)) == (one[:2] < two[:2])


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (pack(LONG, 0, 5), str(LONG)),
        (pack(LONG, 7, 5), f"{LONG}:7"),
        (end(5), FINISHED),
        (5, None),
        (0, None),
    ],
)
def test_texts_are_readable(position: int, text: str | None) -> None:
    """Operators see the sequence number that AWS shows them."""
    assert POSITIONS.to_text(position) == text


def test_a_time_alone_is_a_position() -> None:
    """An operator's seek to a time leaves no sequence number."""
    now = position_now()
    assert POSITIONS.resume_after(now, None) == now
    assert POSITIONS.to_time(now) == now
    assert sequence_of(now) == 0


def test_the_end_of_a_shard_is_behind_everything() -> None:
    """Also when it is read back."""
    assert end(0) > pack(END_SEQUENCE - 1, 2**32 - 1, 2**60)
    assert POSITIONS.resume_after(7, FINISHED) == end(7)
    assert is_end(end(7))
    assert not is_end(pack(LONG, 0, 7))


def test_positions_fit_what_the_engine_takes() -> None:
    """At most 320 bits, and fewer than 100 decimal digits."""
    assert end(2**60 - 1).bit_length() <= 320
    assert len(str(end(2**60 - 1))) < 100


@pytest.mark.parametrize(
    "text", ["", "x", "1:", ":1", "1:2:3", "-1", "1 ", "²", "1:4294967296", "1" * 60, "9" * 5000]
)
def test_foreign_positions_are_refused(text: str) -> None:
    """Another program wrote the queue node."""
    with pytest.raises(ValueError, match="SHARD_END"):
        POSITIONS.resume_after(1, text)


def test_ids_are_stable_and_readable() -> None:
    """The id stays the same when a message is read again."""
    assert POSITIONS.message_id(pack(LONG, 0, 5), 1) == str(LONG)
    assert POSITIONS.message_id(pack(LONG, 3, 9), 2) == f"{LONG}:3"
    assert POSITIONS.identity(pack(LONG, 3, 9)) == POSITIONS.identity(pack(LONG, 3, 10))
