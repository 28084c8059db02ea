"""Recorded positions that lie in the future: another program has written them.

A worker that believed them would pass over the messages that are sent until then.
"""

from __future__ import annotations

from qdo.brokers.base import Broker
from qdo.errors import PositionAheadError
from qdo.positions import format_position, position_now


def check_reached(broker: Broker, queue: str, done: int) -> None:
    """Check that a queue can have been processed up to a position.

    A message may have a position in the future, if it was sent by a machine whose clock is ahead.

    :raises PositionAheadError: the position is later than now and than every message.
    """
    if _may_be_ahead(broker, done):
        check_head(broker, queue, done, broker.catalog.backlog(queue, 0).head)


def check_head(broker: Broker, queue: str, done: int, head: int) -> None:
    """Check as `check_reached`, given the position of the queue's newest message.

    :raises PositionAheadError: the position is later than now and than every message.
    """
    time = broker.positions.to_time(done)
    if _may_be_ahead(broker, done) and time > broker.positions.to_time(head):
        raise PositionAheadError(queue=queue, time=format_position(time))


def _may_be_ahead(broker: Broker, done: int) -> bool:
    """Return whether a position is only a time, and later than now."""
    positions = broker.positions
    if not broker.capabilities.seekable or positions.to_text(done) is not None:
        return False
    return positions.to_time(done) > position_now()
