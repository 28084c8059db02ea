"""Fault points: the steps of a worker between which it may die or lose its lease.

======================  ================================================================
point                   the worker is about to do this, or has just done it
======================  ================================================================
after-claim             own a queue
before-, after-fetch    read messages of a queue from the broker
before-, after-job      run the job for a message; after it whether it returned or raised
before-, after-send     store the messages that a job sends
before-, after-job-failure  call the app's `job_failure`
before-, after-dead-letter  store a dead letter
before-, after-checkpoint   record the progress of a queue, and its failing message
before-, after-release  release a queue
======================  ================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from qdo.errors import UsageError
from qdo.text import did_you_mean
from qdo.worker.executors.base import JobAborted

Point: TypeAlias = Literal[
    "after-claim",
    "before-fetch",
    "after-fetch",
    "before-job",
    "after-job",
    "before-send",
    "after-send",
    "before-job-failure",
    "after-job-failure",
    "before-dead-letter",
    "after-dead-letter",
    "before-checkpoint",
    "after-checkpoint",
    "before-release",
    "after-release",
]

POINTS: tuple[Point, ...] = get_args(Point)
"""Every fault point."""


class Crashed(JobAborted):
    """Unwinds the stack of a dead process; qdo does not treat it as a failure."""


@dataclass(frozen=True, slots=True)
class Step:
    """A fault point that was reached."""

    point: Point
    queue: str


@dataclass(slots=True)
class _Fault:
    point: Point | None
    queue: str | None
    left: int
    act: Callable[[], None]


class Faults:
    """The faults that will happen, and the points that were reached.

    :ivar steps: every point reached, in order.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._armed: list[_Fault] = []

    def arm(
        self, act: Callable[[], None], point: Point | None, queue: str | None, nth: int
    ) -> None:
        """Call `act` once, when a point is reached the nth time from now on.

        :param point: None for every point; so is `queue`.
        :raises UsageError: there is no such point.
        """
        if point is not None and point not in POINTS:
            hint = did_you_mean(point, POINTS)
            raise UsageError(
                reason=f"a fault point must be one of {', '.join(POINTS)}, got {point!r}{hint}"
            )
        if nth < 1:
            raise UsageError(reason=f"nth must be at least 1, the first time, got {nth!r}")
        self._armed.append(_Fault(point, queue, nth, act))

    def pending(self) -> int:
        """Return the number of faults that have not happened yet."""
        return len(self._armed)

    def reach(self, point: Point, queue: str) -> None:
        """Execute the faults that are due at this point; may raise `Crashed`."""
        self.steps.append(Step(point, queue))
        due = []
        for fault in self._armed:
            if fault.point in (None, point) and fault.queue in (None, queue):
                fault.left -= 1
                if not fault.left:
                    due.append(fault)
        for fault in due:
            self._armed.remove(fault)
        for fault in due:
            fault.act()
