"""What the positions of a broker mean.

A position is an int that grows in the order in which the messages of a queue are given to its
owner. The engine only compares positions; everything else that it needs to know of one is asked
here: what stands in the queue node for it, and which message it means.
"""

from __future__ import annotations

from qdo.message import message_id


class Positions:
    """Positions that are UUIDv1 times, as those of the embedded broker; base of all others.

    :cvar lasting: a position means the same message to every owner. Where it does not, a
        message gets a new position whenever it is received, and nothing is recorded by
        position but `last` and the marks of messages that fail, which `name` finds again.
    """

    lasting = True
    earliest = 0
    """``last`` before the oldest message there is, where an operator goes back to that."""

    def begin(self, last: int, position: str | None) -> int:
        """Return the position after which an owner goes on.

        :param last: UUIDv1 time, as recorded; 0 before the first message.
        :param position: the broker's own position as recorded beside it, None for none: after an
            operator's seek to a time, say.
        :raises ValueError: `position` is none of this broker's.
        """
        return last

    def last(self, position: int) -> int:
        """Return the UUIDv1 time that is recorded as ``last`` for a position."""
        return position

    def text(self, position: int) -> str | None:
        """Return what is recorded as ``position`` beside it, None for nothing."""
        return None

    def name(self, position: int) -> int:
        """Return what stays the same of a position when the message is given to another owner."""
        return position

    def ahead(self, position: int, done: int) -> int:
        """Return a position of a message that was not received yet: not behind `done`.

        Where positions do not last one of another owner says nothing about what this one has
        done: the message is still to come, and what is known of it must not be dropped as past.
        """
        return position

    def message_id(self, position: int, node: int) -> str:
        """Return the id of a message whose headers name none."""
        return message_id(position, node)


TIMES = Positions()
"""Those of brokers whose positions are times."""
