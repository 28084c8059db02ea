"""The clock of a testing kit, which only the test moves.

During a test, qdo itself must use this clock, for example for backoffs and due times. The engine
takes its clock as an argument. `PATCHED` names the modules that read the time themselves. These
modules use a replacement while a clock is `installed`. The code under test and its libraries use
the real clock.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from typing import Any

from qdo.errors import UsageError
from qdo.positions import GREGORIAN_OFFSET
from qdo.system.clock import clock

# 2026-01-01T00:00:00Z. With a fixed start, every run has the same positions and ids.
START = 1_767_225_600.0
# Tolerance of due times, because recorded times are rounded to milliseconds.
TOLERANCE_SECONDS = 0.001
# Modules that read the time, and the global variable that a clock replaces in each module.
PATCHED = {
    "qdo.brokers.embedded.broker": "time",
    "qdo.message": "clock",
    "qdo.positions": "time",
    "qdo.requests.jobs": "clock",
    "qdo.requests.calls": "time",
    "qdo.worker.engine.queue_ends": "time",
    "qdo.worker.engine.subscriptions": "time",
    "qdo.worker.pools.subscription": "clock",
}

_installed: list[Clock] = []


class Clock:
    """A clock that moves only on request.

    :param start: Unix time at which the clock starts, in seconds.
    """

    def __init__(self, start: float = START) -> None:
        self._start = start
        self._passed = 0.0

    @property
    def now(self) -> float:
        """Return the Unix time in seconds."""
        return self._start + self._passed

    def passed(self) -> float:
        """Return the seconds since the start. Leases, turns and backoffs use this time."""
        return self._passed

    def position(self) -> int:
        """Return the current time as a position (100 ns intervals since 1582-10-15)."""
        return round(self._start * 10_000_000) + round(self._passed * 10_000_000) + GREGORIAN_OFFSET

    def passed_at(self, moment: float) -> float:
        """Return the value of `passed` at a Unix time."""
        return moment - self._start

    def move(self, seconds: float) -> None:
        """Advance by a number of seconds."""
        if not seconds >= 0:
            raise UsageError(reason=f"the clock must move by 0 s or more, got {seconds!r}")
        self._passed += seconds

    def move_to(self, passed: float) -> None:
        """Advance until `passed` returns this value. Do nothing if its value is already larger."""
        self._passed = max(self._passed, passed)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make qdo's own modules use this clock until the block ends."""
        if any(other is not self for other in _installed):
            raise UsageError(
                reason="another TestKit is open with another clock; close it first, or share its"
                " clock, as in TestKit(app, clock=other.clock)"
            )
        _installed.append(self)
        replacements = {"time": _TimeModule(self), "clock": self.passed}
        for module, name in PATCHED.items():
            vars(importlib.import_module(module))[name] = replacements[name]
        try:
            yield
        finally:
            _installed.remove(self)
            if not _installed:
                originals = {"time": time, "clock": clock}
                for module, name in PATCHED.items():
                    vars(importlib.import_module(module))[name] = originals[name]


class _TimeModule:
    """Replaces the module `time`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def time(self) -> float:
        return self._clock.now

    def time_ns(self) -> int:
        return 100 * (self._clock.position() - GREGORIAN_OFFSET)

    def sleep(self, seconds: float) -> None:
        raise UsageError(
            reason="the result cannot arrive, because the kit has run all jobs that can run; resume"
            " or cancel the request, or register a job for its pool"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
