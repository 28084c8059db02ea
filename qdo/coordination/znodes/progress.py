"""Progress values inside a queue node: positions, failure records, done ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

from qdo.coordination.znodes.values import shown

MAX_LAST = 2**60 - 1
"""A UUIDv1 timestamp has 60 bits: `last` ends in the year 5236."""


_MAX_DIGITS = 100


MAX_POSITION = 10**_MAX_DIGITS - 1
"""A broker's positions may be wider than times; see `qdo.positions`."""


DECISIONS = ("skip", "dead-letter")
"""An operator's decisions on a message, for the owner of its queue to carry out."""


MAX_ATTEMPTS = 10**9
"""A larger number of attempts was written by another program."""


MAX_CANCELLED = 1000
"""Cancelled messages in a queue node: about 10 KB of JSON."""


FAILURE_ERROR_CHARACTERS = 300
"""Limit of an error in a queue node: nodes of thousands of queues must stay small."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """The failed attempts of a message after `last`; the record outlives its worker.

    It is the value of ``failing`` in the queue node, or of ``blocked`` while the queue waits for an
    operator.

    :ivar attempts: how many attempts failed, or ended with their process.
    :ivar error: the error of the last attempt, as one line.
    :ivar crashed: whether the last attempt ended with its process.
    :ivar retry_at: Unix time before which the message should not run again, 0 for any time.
    :ivar blocked_since: Unix time since when its queue is blocked, 0 while it is not. With
        `retry_at` as well, the message cannot be decrypted, and runs once its key is there.
    :ivar decision: the operator's decision: "", "skip" or "dead-letter".
    :ivar retry_delay: seconds from the last attempt to `retry_at`, 0 if unknown. A wait never needs
        to be longer than this, even if the clock was set.
    """

    position: int
    attempts: int
    error: str = ""
    crashed: bool = False
    retry_at: float = 0.0
    blocked_since: float = 0.0
    decision: str = ""
    retry_delay: float = 0.0

    @property
    def blocked(self) -> bool:
        """Whether the queue waits for an operator, or for a key."""
        return self.blocked_since > 0

    @property
    def held(self) -> bool:
        """Whether the queue waits for an operator; one with a missing key looks for it."""
        return self.blocked and not self.retry_at

    @classmethod
    def parse(cls, value: Any) -> FailureRecord | None:
        """Parse a record; return None if it is unreadable: attempts then count from 1 again."""
        if not isinstance(value, dict):
            return None
        position, fault = parse_last(value.get("position"), MAX_POSITION)
        attempts = value.get("attempts")
        if fault or not position or isinstance(attempts, bool) or not isinstance(attempts, int):
            return None
        return cls(
            position,
            min(max(0, attempts), MAX_ATTEMPTS),
            str(value.get("error", ""))[:FAILURE_ERROR_CHARACTERS],
            bool(value.get("crashed", False)),
            _moment(value.get("retry_at")),
            _moment(value.get("blocked_since")),
            decision if (decision := value.get("decision")) in DECISIONS else "",
            _moment(value.get("retry_delay")),
        )

    def dump(self) -> dict[str, Any]:
        """Return the value for the queue node."""
        value: dict[str, Any] = {
            "position": str(self.position),
            "attempts": self.attempts,
            "error": self.error[:FAILURE_ERROR_CHARACTERS],
        }
        for name in ("crashed", "retry_at", "retry_delay", "blocked_since", "decision"):
            if getattr(self, name):
                value[name] = getattr(self, name)
        return value


def _moment(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e12 else 0.0


class CancelOutcome(Enum):
    """What became of the attempt to cancel a message.

    Only a message whose first attempt has not begun can be cancelled: a failing one has begun.
    """

    CANCELLED = "cancelled"
    ALREADY = "already-cancelled"
    STARTED = "started"
    FAILING = "failing"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class OutOfOrderProgress:
    """Progress beyond `last`, for a queue whose messages are not processed strictly in order.

    The queue node has it as three values. ``done_ranges`` are pairs of numbers: the distance from
    the range before (or from `last`) to the start of this range of done messages, and the distance
    from its first to its newest message. ``other_failures`` are failure records like ``failing``.
    ``cancelled`` are the distances from `last` to the first, and from one to the next, of the
    messages that an operator has cancelled.

    :ivar done_ranges: first and newest position of each range of done messages, ascending.
    :ivar other_failures: records of failing messages, apart from the node's `failure`.
    :ivar cancelled: positions of messages that must not be started, ascending.
    """

    done_ranges: tuple[tuple[int, int], ...] = ()
    other_failures: tuple[FailureRecord, ...] = ()
    cancelled: tuple[int, ...] = ()

    @classmethod
    def parse(
        cls, last: int, ranges: Any, failures: Any, cancelled: Any = None
    ) -> OutOfOrderProgress | None:
        """Parse the values; unreadable parts are left out, and their messages run again."""
        if ranges is None and failures is None and cancelled is None:
            return None
        found = cls(
            tuple(_parse_ranges(last, ranges)),
            tuple(
                each
                for value in (failures if isinstance(failures, list) else ())
                if (each := FailureRecord.parse(value)) is not None and each.position > last
            ),
            tuple(_parse_cancelled(last, cancelled)),
        )
        return found or None

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self.done_ranges or self.other_failures or self.cancelled)

    def is_done(self, position: int) -> bool:
        """Return whether the message at a position is done."""
        return any(first <= position <= newest for first, newest in self.done_ranges)

    def with_cancelled(self, positions: Iterable[int]) -> OutOfOrderProgress:
        """Return the progress with further cancelled messages."""
        return replace(self, cancelled=tuple(sorted({*self.cancelled, *positions})))

    def dump(self, last: int) -> dict[str, Any]:
        """Return the values for the queue node."""
        pairs = []
        before = last
        for first, newest in self.done_ranges:
            pairs.append([first - before, newest - first])
            before = newest
        value: dict[str, Any] = {"done_ranges": pairs} if pairs else {}
        if self.other_failures:
            value["other_failures"] = [each.dump() for each in self.other_failures]
        if self.cancelled:
            value["cancelled"] = [b - a for a, b in pairwise((last, *self.cancelled))]
        return value


def cancel_outcome(
    progress: OutOfOrderProgress | None,
    failures: Iterable[FailureRecord],
    done: int,
    position: int,
) -> CancelOutcome:
    """Return what becomes of a message that is to be cancelled, if it has not been started.

    :param failures: those of messages behind `done`.
    :param done: all messages up to this position are done.
    """
    if position <= done:
        return CancelOutcome.DONE
    if progress is not None and position in progress.cancelled:
        return CancelOutcome.ALREADY  # also if it is done: without having been started
    if progress is not None and progress.is_done(position):
        return CancelOutcome.DONE
    if any(each.position == position for each in failures):
        return CancelOutcome.FAILING
    return CancelOutcome.CANCELLED


def _parse_ranges(last: int, value: Any) -> Iterator[tuple[int, int]]:
    before = last
    for pair in value if isinstance(value, list) else ():
        valid = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not valid or pair[0] < 1 or pair[1] < 0 or before + sum(pair) > MAX_POSITION:
            return
        first = before + pair[0]
        before = first + pair[1]
        yield first, before


def _parse_cancelled(last: int, value: Any) -> Iterator[int]:
    position = last
    for distance in value[:MAX_CANCELLED] if isinstance(value, list) else ():
        if type(distance) is not int or not 1 <= distance <= MAX_POSITION - position:
            return
        position += distance
        yield position


def parse_last(text: Any, most: int = MAX_LAST) -> tuple[int, str | None]:
    """Return a position, and why it is unreadable, if it is."""
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text <= most:
        return text, None
    if not isinstance(text, str):
        return 0, f"last must be a decimal string, got {shown(text)}"
    digits = text.strip().removesuffix("L").strip()
    if not digits:
        return 0, None if not text.strip() else f"last must be a decimal string, got {shown(text)}"
    if not (digits.isascii() and digits.isdigit()):
        return 0, f"last must be a decimal string, got {shown(text)}"
    # The length first: Python rejects thousands of digits.
    if len(digits) > _MAX_DIGITS or int(digits) > most:
        return 0, f"last is larger than any position: {digits[:60]}"
    return int(digits), None
