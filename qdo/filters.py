"""Which queues a worker takes: globs of those it is for, and of those it leaves to others."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueFilter:
    """A queue is taken if a glob of `queues` matches its name and none of `exclude` does."""

    queues: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether it takes every queue, whatever its name."""
        return "*" in self.queues and not self.exclude

    def matcher(self) -> Callable[[str], bool]:
        """Return a function that says whether a queue is taken; for many names."""
        if self.everything:
            return _always
        wanted, left_out = _pattern(self.queues), _pattern(self.exclude)
        if not self.exclude:
            return lambda queue: wanted(queue) is not None
        return lambda queue: wanted(queue) is not None and left_out(queue) is None

    def takes(self, queue: str) -> bool:
        """Return whether a queue is taken."""
        return self.matcher()(queue)

    def __str__(self) -> str:
        """Return it as it is given on the command line, "" for everything."""
        wanted = [] if self.queues == ("*",) else [f"--queues {glob}" for glob in self.queues]
        return " ".join([*wanted, *(f"--exclude {glob}" for glob in self.exclude)])


EVERYTHING = QueueFilter()


def _always(queue: str) -> bool:
    return True


def _pattern(globs: Iterable[str]) -> Callable[[str], re.Match[str] | None]:
    return re.compile("|".join(map(fnmatch.translate, globs)) or r"(?!)").match
