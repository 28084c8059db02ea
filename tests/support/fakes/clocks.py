"""A clock that stands until a test moves it."""

from __future__ import annotations

from typing import Generic, TypeVar

Moment = TypeVar("Moment", int, float)


class SettableClock(Generic[Moment]):
    """Shows `now`, whether that is a time or a position."""

    def __init__(self, now: Moment) -> None:
        self.now = now

    def __call__(self) -> Moment:
        return self.now
