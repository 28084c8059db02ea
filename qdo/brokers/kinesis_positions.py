"""What the positions of Kinesis records mean.

A position is ``sequence << 96 | subsequence << 64 | time``: the sequence number of the record
(up to 190 bits), the place of a message within an aggregated record, and the UUIDv1 time of the
record's arrival. So positions compare as sequence numbers do, by value and not as text, and each
carries the time that is recorded as `last`. Positions without a sequence number are times: those
that operators seek to.
"""

from __future__ import annotations

from qdo.positions import Positions

FINISHED = "SHARD_END"
"""Recorded as position of a shard that was processed to its end."""
END_SEQUENCE = (1 << 190) - 1
"""Stands for the end of a shard; AWS's own sequence numbers have 186 bits."""

HEIR = 2
"""Recorded as `last` of a shard that begins with its first message, whatever is configured. No
operator asked for it, as for `KinesisPositions.earliest`."""

_SEQUENCE_SHIFT = 96
_SUBSEQUENCE_SHIFT = 64
_TIME_MASK = (1 << _SUBSEQUENCE_SHIFT) - 1
_SUBSEQUENCE_MASK = (1 << (_SEQUENCE_SHIFT - _SUBSEQUENCE_SHIFT)) - 1


def pack(sequence: int, subsequence: int, time: int) -> int:
    """Return the position of a message.

    :param time: UUIDv1 time of the record's arrival.
    """
    return sequence << _SEQUENCE_SHIFT | subsequence << _SUBSEQUENCE_SHIFT | time


def whole(sequence: int, time: int) -> int:
    """Return the position behind all messages of a record, however many there are in it."""
    return pack(sequence, _SUBSEQUENCE_MASK, time)


def at_time(position: int, time: int) -> int:
    """Return the position with another time, one that is known to have nothing before it left."""
    return place_of(position) << _SUBSEQUENCE_SHIFT | time


def end(time: int) -> int:
    """Return the position that stands for the end of a shard."""
    return pack(END_SEQUENCE, 0, time)


def sequence_of(position: int) -> int:
    """Return the sequence number in a position, 0 where it is only a time."""
    return position >> _SEQUENCE_SHIFT


def place_of(position: int) -> int:
    """Return sequence and subsequence number of a position as one number that can be compared."""
    return position >> _SUBSEQUENCE_SHIFT


def time_in(position: int) -> int:
    """Return the UUIDv1 time in a position."""
    return position & _TIME_MASK


def is_end(position: int) -> bool:
    """Return whether a position stands for the end of a shard."""
    return sequence_of(position) == END_SEQUENCE


class KinesisPositions(Positions):
    """Positions of Kinesis: recorded as ``SEQUENCE``, ``SEQUENCE:SUBSEQUENCE`` or ``SHARD_END``."""

    lasting = True
    earliest = 1
    """A time before all others: 0 stands for the start that the address says."""

    def begin(self, last: int, position: str | None) -> int:
        if position is None:
            return last
        if position == FINISHED:
            return end(last)
        sequence, colon, subsequence = position.partition(":")
        place = _number(sequence, END_SEQUENCE - 1), _number(subsequence, _SUBSEQUENCE_MASK)
        if place[0] is None or (colon and place[1] is None):
            raise ValueError(
                f"position {position[:100]!r} is neither SEQUENCE nor SEQUENCE:SUBSEQUENCE"
                f" nor {FINISHED}"
            )
        return pack(place[0], place[1] or 0, last)

    def last(self, position: int) -> int:
        return time_in(position)

    def text(self, position: int) -> str | None:
        sequence = sequence_of(position)
        if not sequence:
            return None
        if sequence == END_SEQUENCE:
            return FINISHED
        subsequence = place_of(position) & _SUBSEQUENCE_MASK
        return f"{sequence}:{subsequence}" if subsequence else str(sequence)

    def name(self, position: int) -> int:
        return place_of(position)

    def message_id(self, position: int, node: int) -> str:
        return self.text(position) or str(time_in(position))


def _number(text: str, most: int) -> int | None:
    """Return a decimal number in its usual form, None for anything else."""
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(most)):
        return None
    return int(text) if int(text) <= most else None


POSITIONS = KinesisPositions()
