"""What observers of an app are told: one event for each attempt that ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

OutcomeName: TypeAlias = Literal["done", "retry", "dead-letter", "skip", "block", "stop", "lost"]
"""How an attempt ended: the closed set. ``lost``: its queue was given to another worker
meanwhile, which runs the message again."""

OUTCOMES: tuple[OutcomeName, ...] = get_args(OutcomeName)


@dataclass(frozen=True, slots=True)
class Event:
    """An attempt that ended.

    :ivar attempt: its number, from 1.
    :ivar error: what went wrong, as one line; the reason of a dead letter, skip or stop; None
        where the job returned.
    :ivar seconds: how long the job ran; 0 where it was decided without running it, as for a
        message that an operator ends or that killed its last process.
    :ivar worker: name of the worker node.
    """

    queue: str
    message_id: str
    position: int
    attempt: int
    outcome: OutcomeName
    error: str | None
    seconds: float
    worker: str
