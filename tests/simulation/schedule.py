"""Virtual time: actions in the order of their times, one seeded source of chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]


class Schedule:
    """Runs actions in the order of their times; equal times in the order of arrival.

    :ivar now: the virtual time in seconds.
    :ivar steps: how many actions have run.
    :ivar trace: the events, when tracing; None costs nothing.
    """

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.now = 0.0
        self.steps = 0
        self.random = random.Random(seed)
        self.chance = self.random.random
        self.trace: list[str] | None = [] if tracing else None
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, action: Action, *arguments: Any) -> None:
        """Run `action` at virtual time `when`, at once if that is past."""
        self._count += 1
        heappush(self._heap, (when, self._count, action, arguments))

    def after(self, delay: float, action: Action, *arguments: Any) -> None:
        """Run `action` when `delay` seconds have passed."""
        self._count += 1
        heappush(self._heap, (self.now + delay, self._count, action, arguments))

    def run(self, until: float) -> None:
        """Run every action due up to `until` and leave the clock there."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, action, arguments = heappop(heap)
            if when > self.now:
                self.now = when
            self.steps += 1
            action(*arguments)
        self.now = max(self.now, until)

    def note(self, text: str, *arguments: Any) -> None:
        """Add a line to the trace, if there is one."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f}  {text % arguments if arguments else text}")
