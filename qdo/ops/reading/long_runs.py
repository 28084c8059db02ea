"""The messages that have run for long, as workers report them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qdo.text import fine_duration, one_line, short_duration

_FIELDS = 5


@dataclass(frozen=True, slots=True)
class LongRun:
    """A message in flight.

    :ivar id: `message.id`.
    :ivar attempt: which attempt it is.
    :ivar seconds: for how long it had been running when its worker reported it.
    :ivar usual_seconds: what messages of its queue usually take at most, if this one runs for much
        longer; otherwise None.
    """

    id: str
    attempt: int
    seconds: float
    usual_seconds: float | None = None

    def text(self) -> str:
        """Return a sentence without its full stop."""
        text = f"Message {self.id} has run for {short_duration(self.seconds)}"
        if self.usual_seconds is None:
            return text
        return f"{text} (usually {fine_duration(self.usual_seconds)} at most)"


def long_runs(components: Iterable[Mapping[str, Any]]) -> dict[str, LongRun]:
    """Return the longest run of each queue, from the nodes of worker processes.

    Entries that make no sense were written by another program, and are left out.
    """
    found: dict[str, LongRun] = {}
    for component in components:
        entries = component.get("long_runs")
        for entry in entries if isinstance(entries, list) else ():
            parsed = _parse(entry)
            if parsed is None:
                continue
            queue, run = parsed
            if queue not in found or found[queue].seconds < run.seconds:
                found[queue] = run
    return found


def _parse(entry: Any) -> tuple[str, LongRun] | None:
    if not isinstance(entry, list) or len(entry) != _FIELDS:
        return None
    queue, id, attempt, seconds, usual = entry
    texts = isinstance(queue, str) and isinstance(id, str)
    numbers = type(attempt) is int and _is_duration(seconds)
    if not texts or not numbers or not (usual is None or _is_duration(usual)):
        return None
    return queue, LongRun(one_line(id), attempt, float(seconds), usual)


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")
