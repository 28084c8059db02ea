"""One message of an SQS queue that is in flight."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.base import Row


@dataclass(slots=True)
class InFlightMessage:
    """A message that was received.

    :ivar kept: the place of its receipt in the store for the parent process.
    :ivar until: clock time until which SQS certainly hides it.
    :ivar extend_at: clock time at which to extend its visibility timeout.
    :ivar forever: clock time after which it cannot be hidden.
    :ivar has_followers: its message group probably has more messages, which SQS does not return
        before those that are received are deleted.
    """

    position: int
    row: Row
    receipt: str
    group: str | None
    pointer: BodyPointer | None
    until: float
    extend_at: float
    forever: float
    done: bool = False
    kept: int = 0
    has_followers: bool = False
