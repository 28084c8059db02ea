"""Positions of messages in Kinesis.

A position is ``sequence << 96 | subsequence << 64 | time``. The sequence number of the record has
up to 190 bits. The subsequence is the index of the message within an aggregated record. The time is
the UUIDv1 time of the record's arrival. So positions compare like sequence numbers, by value and
not as text. Workers record the time in a position as `last`. A position without a sequence number
is only a time, the target of an operator's seek.
"""

from __future__ import annotations

from qdo.positions import Positions

# The recorded position of a shard that workers have processed to its end.
FINISHED = "SHARD_END"
# The sequence number for the end of a shard. AWS's own sequence numbers have 186 bits.
END_SEQUENCE = (1 << 190) - 1

# The `last` of a child shard that begins with its first message, regardless of the configured
# start. Unlike `KinesisPositions.earliest`, this value does not come from an operator's seek.
CHILD_START = 2

_SEQUENCE_SHIFT = 96
_SUBSEQUENCE_SHIFT = 64
_TIME_MASK = (1 << _SUBSEQUENCE_SHIFT) - 1
_SUBSEQUENCE_MASK = (1 << (_SEQUENCE_SHIFT - _SUBSEQUENCE_SHIFT)) - 1


def pack(sequence: int, subsequence: int, time: int) -> int:
    """Return the position of a message; `time` is the UUIDv1 time of the record's arrival."""
    return sequence << _SEQUENCE_SHIFT | subsequence << _SUBSEQUENCE_SHIFT | time


def whole(sequence: int, time: int) -> int:
    """Return the position after all messages of a record."""
    return pack(sequence, _SUBSEQUENCE_MASK, time)


def at_time(position: int, time: int) -> int:
    """Return the position with another time, the time up to which the owner read all messages."""
    return index_in_record(position) << _SUBSEQUENCE_SHIFT | time


def end(time: int) -> int:
    return pack(END_SEQUENCE, 0, time)


def sequence_of(position: int) -> int:
    """Return the sequence number in a position; 0 if the position is only a time."""
    return position >> _SEQUENCE_SHIFT


def index_in_record(position: int) -> int:
    """Return the sequence and subsequence number of a position as one comparable number."""
    return position >> _SUBSEQUENCE_SHIFT


def time_in(position: int) -> int:
    """Return the UUIDv1 time in a position."""
    return position & _TIME_MASK


def is_end(position: int) -> bool:
    return sequence_of(position) == END_SEQUENCE


class KinesisPositions(Positions):
    """Positions of Kinesis, recorded as ``SEQUENCE``, ``SEQUENCE:SUBSEQUENCE`` or ``SHARD_END``."""

    stable = True
    # The earliest time. A position of 0 means the configured start of the broker's address.
    earliest = 1

    def resume_after(self, last: int, position: str | None) -> int:
        if position is None:
            return last
        if position == FINISHED:
            return end(last)
        sequence, colon, subsequence = position.partition(":")
        numbers = _number(sequence, END_SEQUENCE - 1), _number(subsequence, _SUBSEQUENCE_MASK)
        if numbers[0] is None or (colon and numbers[1] is None):
            raise ValueError(
                f"position must be SEQUENCE, SEQUENCE:SUBSEQUENCE or {FINISHED},"
                f" got {position[:100]!r}"
            )
        return pack(numbers[0], numbers[1] or 0, last)

    def to_time(self, position: int) -> int:
        return time_in(position)

    def to_text(self, position: int) -> str | None:
        sequence = sequence_of(position)
        if not sequence:
            return None
        if sequence == END_SEQUENCE:
            return FINISHED
        subsequence = index_in_record(position) & _SUBSEQUENCE_MASK
        return f"{sequence}:{subsequence}" if subsequence else str(sequence)

    def identity(self, position: int) -> int:
        return index_in_record(position)

    def message_id(self, position: int, node: int) -> str:
        return self.to_text(position) or str(time_in(position))


def _number(text: str, most: int) -> int | None:
    """Parse a decimal number up to `most`; return None for any other text."""
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(most)):
        return None
    return int(text) if int(text) <= most else None


POSITIONS = KinesisPositions()
