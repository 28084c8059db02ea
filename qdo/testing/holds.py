"""The pauses of a testing kit."""

from __future__ import annotations

from collections.abc import Callable

from qdo.errors import UsageError
from qdo.fleet.hold_node import Hold
from qdo.fleet.holds import new_hold


class KitHolds:
    """The paused queues of a kit, like those of a fleet after `qdo pause`.

    :ivar holds: the pauses in force.
    :param on_change: called after each change.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.holds: list[Hold] = []
        self._on_change = on_change

    def pause(self, *queues: str) -> None:
        """Start no message of queues that match one of these globs, until `resume`.

        :raises UsageError: a glob is not valid.
        """
        self.holds.append(new_hold(queues))
        self._on_change()

    def resume(self, *queues: str) -> None:
        """End the pause with exactly these globs, or all pauses without any.

        :raises UsageError: there is no such pause.
        """
        left = [each for each in self.holds if queues and set(each.queues) != set(queues)]
        if queues and len(left) == len(self.holds):
            known = ", ".join(repr(" ".join(each.queues)) for each in self.holds) or "none"
            raise UsageError(
                reason=f"queues must be those of a pause, got {' '.join(queues)!r}; paused: {known}"
            )
        self.holds[:] = left
        self._on_change()
