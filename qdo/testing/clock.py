"""The clock of a testing kit: it stands still until it is told to move.

What qdo itself asks for the time while an app is tested, be it how long a back-off lasts or
when a delayed message is due, must ask this clock. The engine takes its clock as an argument;
`qdo.message` (positions, deadlines) and `qdo.worker.outcome` (times that are recorded) ask
the module `time`, and find a stand-in of it while a clock is `installed`. The code under test and
its libraries find the real one.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from typing import Any

from qdo.errors import UsageError
from qdo.message import GREGORIAN_OFFSET

START = 1_767_225_600.0
"""2026-01-01T00:00:00Z: the same in every run, so that positions and ids are, too."""
TOLERANCE_SECONDS = 0.001
"""What is due within this is due: recorded times are rounded to milliseconds."""
PATCHED = ("qdo.message", "qdo.worker.outcome")
"""Modules that ask the module `time`."""

_installed: list[Clock] = []


class Clock:
    """A time that moves only when told to.

    :param start: Unix time at which it begins; seconds.
    """

    def __init__(self, start: float = START) -> None:
        self._start = start
        self._passed = 0.0

    @property
    def now(self) -> float:
        """Unix time; seconds."""
        return self._start + self._passed

    def passed(self) -> float:
        """Return the seconds since it began: what leases, turns and back-offs count in."""
        return self._passed

    def position(self) -> int:
        """Return the present as a position (100 ns intervals since 1582-10-15)."""
        return round(self._start * 10_000_000) + round(self._passed * 10_000_000) + GREGORIAN_OFFSET

    def passed_at(self, moment: float) -> float:
        """Return what `passed` gives at a Unix time."""
        return moment - self._start

    def move(self, seconds: float) -> None:
        """Let so much time pass.

        :raises UsageError: time cannot go back.
        """
        if not seconds >= 0:
            raise UsageError(reason=f"the clock cannot move by {seconds!r} s: give 0 or more")
        self._passed += seconds

    def move_to(self, passed: float) -> None:
        """Let time pass until `passed` gives this; nothing happens if it is over already."""
        self._passed = max(self._passed, passed)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have qdo's own modules ask this clock, until the block ends.

        :raises UsageError: they ask another one already.
        """
        if any(other is not self for other in _installed):
            raise UsageError(
                reason="there is an open TestKit with another clock: close it first, or give"
                " both the same, as in TestKit(app, clock=other.clock)"
            )
        modules = [importlib.import_module(name) for name in PATCHED]
        _installed.append(self)
        for module in modules:
            vars(module)["time"] = _Stand(self)
        try:
            yield
        finally:
            _installed.remove(self)
            for module in modules:
                if not _installed:
                    vars(module)["time"] = time


class _Stand:
    """Stands in for the module `time`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def time(self) -> float:
        return self._clock.now

    def time_ns(self) -> int:
        return 100 * (self._clock.position() - GREGORIAN_OFFSET)

    def clock_gettime(self, clock: int) -> float:
        return self._clock.passed()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
