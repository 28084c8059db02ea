"""Positions of the SQS broker: a message's send time and identity.

SQS has no positions. A message gets one when it is received:

======================  ===========================================================================
bits                    content
======================  ===========================================================================
256 and above           a UUIDv1 time: when it was sent, or a little more where messages received
                        before it were sent later; grows with every message that is received
128 to 255              its SequenceNumber, 0 in a standard queue
0 to 127                its MessageId
======================  ===========================================================================

So the positions of one owner grow in the order of receipt, as the engine requires. `last` records
the time. The lower 256 bits identify the message for every owner.
"""

from __future__ import annotations

import uuid

from qdo.positions import Positions

_NAME_BITS = 256
_NAME = (1 << _NAME_BITS) - 1
_ID_BITS = 128
_ID = (1 << _ID_BITS) - 1


class SqsPositions(Positions):
    """See the module's docstring."""

    stable = False

    def resume_after(self, last: int, position: str | None) -> int:
        return last << _NAME_BITS

    def to_time(self, position: int) -> int:
        return position >> _NAME_BITS

    def identity(self, position: int) -> int:
        return position & _NAME

    def not_before(self, position: int, done: int) -> int:
        if position > done:
            return position
        return ((self.to_time(done) + 1) << _NAME_BITS) | self.identity(position)

    def message_id(self, position: int, node: int) -> str:
        return str(uuid.UUID(int=position & _ID))


SQS_POSITIONS = SqsPositions()


def make_position(moment: int, sequence: int, message_id: int) -> int:
    """Return the position of a message.

    :param moment: UUIDv1 time.
    """
    return (moment << _NAME_BITS) | (sequence << _ID_BITS) | message_id


def sequence_of(position: int) -> int:
    """Return the SequenceNumber of a message, 0 in a standard queue."""
    return (position & _NAME) >> _ID_BITS
