"""Tracks the progress of a queue whose messages finish out of order.

A message is *pending* from the time it is read until it is done. Everything up to the *low
watermark* is done: the watermark is recorded as ``last``. Messages done above it are kept as runs:
a run ``(first, newest)`` means that every message of the queue from the position `first` to the
position `newest` is done. Messages are only ever appended behind all others. Nothing can
appear within a run, and there is at most one run more than there are pending messages.

Kafka's Parallel Consumer and Pulsar's individual acknowledgements keep the same books, with bits
in place of runs: https://pulsar.apache.org/docs/concepts-messaging/#acknowledgment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Run: TypeAlias = tuple[int, int]


class _Pending:
    """A pending message, and the run of done ones directly behind it (`first` 0: no run)."""

    __slots__ = ("after", "before", "first", "newest")

    def __init__(self, before: _Pending | None) -> None:
        self.before = before
        self.after: _Pending | None = None
        self.first = 0
        self.newest = 0


class WatermarkTracker:
    """The messages of one queue from the watermark to the newest one read.

    Adding and finishing a message take constant time, whatever the order. Memory grows with the
    number of pending messages, not with the number of done ones.

    :param last: the watermark to begin with.
    :param runs: recorded runs of done messages above it, in ascending order.
    """

    def __init__(self, last: int, runs: Iterable[Run] = ()) -> None:
        self._known = [run for run in runs if run[1] > last]
        self._known.reverse()
        self._head = _Pending(None)
        self._head.newest = last
        self._tail = self._head
        self._pending: dict[int, _Pending] = {}

    @property
    def last(self) -> int:
        """The watermark: everything up to this position is done."""
        return self._head.newest

    def __len__(self) -> int:
        """Return the number of pending messages."""
        return len(self._pending)

    def __contains__(self, position: int) -> bool:
        """Return whether a message is pending."""
        return position in self._pending

    def add(self, position: int) -> bool:
        """Add the next message that was read; return False if it is already done."""
        while self._known and self._known[-1][1] < position:
            self._known.pop()
        if self._known and self._known[-1][0] <= position:
            tail = self._tail
            tail.first = tail.first or position
            tail.newest = position
            return False
        node = _Pending(self._tail)
        self._tail.after = self._tail = self._pending[position] = node
        return True

    def done(self, position: int) -> None:
        """Mark a pending message as done; raise KeyError for one that is not pending."""
        node = self._pending.pop(position)
        before, after = node.before, node.after
        if before is None:
            raise KeyError(position)
        before.first = before.first or position
        before.newest = node.newest or position
        before.after = after
        if after is None:
            self._tail = before
        else:
            after.before = before

    def runs(self, most: int) -> tuple[Run, ...]:
        """Return the lowest runs above the watermark, at most `most`.

        Recorded runs of which no message was read yet come last.
        """
        found: list[Run] = []
        node = self._head.after
        while node is not None and len(found) < most:
            if node.first:
                found.append((node.first, node.newest))
            node = node.after
        for first, newest in reversed(self._known):
            if len(found) == most:
                break
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], newest)
            elif newest > self.last:
                found.append((max(first, self.last + 1), newest))
        return tuple(found)
