"""Events for the observers of an app: one for each attempt that ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

OutcomeName: TypeAlias = Literal[
    "done", "retry", "wait", "dead-letter", "skip", "block", "stop", "lost"
]
"""How an attempt ended; the set is closed. ``wait``: a retry without a failed attempt. ``lost``:
another worker owns the queue now, and runs the message again."""

OUTCOMES: tuple[OutcomeName, ...] = get_args(OutcomeName)


@dataclass(frozen=True, slots=True)
class Event:
    """An attempt that ended.

    :ivar attempt: its number, from 1.
    :ivar error: the error as one line; the reason of a dead letter, skip or stop; None if the
        job returned.
    :ivar seconds: how long the job ran; 0 if it did not run, because an operator ended the
        message or because the message killed its last process.
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
