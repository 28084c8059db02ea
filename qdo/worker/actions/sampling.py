"""Samples of the stacks of a process, and their form for programs that draw flame graphs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType

from qdo.fleet.action_machine import Result
from qdo.system.clock import clock
from qdo.system.native import sleep

SAMPLE_SECONDS = 0.01
MAX_FRAMES = 100
"""The innermost frames of a stack that are counted."""


class Samples:
    """Counts of equal stacks."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.taken = 0

    def add(self, stacks: Iterable[Iterable[str]]) -> None:
        """Add the stacks of one moment, each from its outermost function."""
        self.taken += 1
        self._counts.update(";".join(stack) for stack in stacks)

    def folded(self) -> str:
        """Return a line for each stack, the most frequent first: functions, and a count."""
        return "".join(f"{stack} {count}\n" for stack, count in self._counts.most_common())


def profile_result(samples: Samples, seconds: float) -> Result:
    """Return the result of a profile."""
    return Result(f"{samples.taken} samples in {seconds:g} s", samples.folded())


def frame_label(file: str, function: str) -> str:
    """Return a function in the form of a folded stack."""
    folder, name = os.path.split(file)
    if name == "__init__.py":
        name = f"{os.path.basename(folder)}/{name}"
    return f"{name}:{function}".replace(";", ",").replace(" ", "_")


def sample(seconds: float, is_left_out: Callable[[int], bool]) -> Samples:
    """Sample the threads of this process; blocks a native thread.

    :param is_left_out: whether the thread with this ident is not sampled.
    """
    samples, until = Samples(), clock() + seconds
    while clock() < until:
        frames = sys._current_frames()
        samples.add(_stack(frame) for ident, frame in frames.items() if not is_left_out(ident))
        del frames
        sleep(SAMPLE_SECONDS)
    return samples


def _stack(frame: FrameType | None) -> list[str]:
    labels: list[str] = []
    while frame is not None and len(labels) < MAX_FRAMES:
        code = frame.f_code
        labels.append(frame_label(code.co_filename, code.co_name))
        frame = frame.f_back
    return labels[::-1]
