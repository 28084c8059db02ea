"""Positions of the SQS broker: when a message was sent, and which one it is.

SQS has no positions. A message gets one when it is received:

======================  ===========================================================================
bits                    what
======================  ===========================================================================
256 and above           a UUIDv1 time: when it was sent, or a little more where messages received
                        before it were sent later; grows with every message that is received
128 to 255              its SequenceNumber, 0 in a standard queue
0 to 127                its MessageId
======================  ===========================================================================

So the positions of one owner grow in the order of receipt, which is what the engine needs of
them; the time is what `last` records; and the lower 256 bits name the message to every owner.
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

    lasting = False

    def begin(self, last: int, position: str | None) -> int:
        return last << _NAME_BITS

    def last(self, position: int) -> int:
        return position >> _NAME_BITS

    def name(self, position: int) -> int:
        return position & _NAME

    def ahead(self, position: int, done: int) -> int:
        if position > done:
            return position
        return ((self.last(done) + 1) << _NAME_BITS) | self.name(position)

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
