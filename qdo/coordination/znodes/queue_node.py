"""The value of a queue node, with the queue's progress; docs/znodes.rst describes all nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

from qdo.coordination.znodes.values import (
    MAX_QUEUE_BYTES,
    MAX_VALUE_BYTES,
    encode,
    is_flat,
    load,
    shown,
    string_tuple,
)
from qdo.positions import TIME_POSITIONS, Positions
from qdo.queues import is_path_part

# A UUIDv1 timestamp has 60 bits, so `last` ends in the year 5236.
MAX_LAST = 2**60 - 1
_MAX_DIGITS = 100
# A broker's positions may be larger than times; see `qdo.positions`.
MAX_POSITION = 10**_MAX_DIGITS - 1
# The decisions of an operator about a message that the owner of the queue carries out.
DECISIONS = ("skip", "dead-letter")
# The maximum number of attempts. Only another program writes a larger number.
MAX_ATTEMPTS = 10**9
# The maximum number of cancelled messages in a queue node, about 10 KB of JSON.
MAX_CANCELLED = 1000
# The maximum length of an error in characters, because thousands of nodes must stay small.
FAILURE_ERROR_CHARACTERS = 300
# The beginning of the error of a message whose attempts the next owner has counted.
OWNERS_GONE = "its owners died or lost their sessions in its attempts: "
# The maximum factor by which a rewrite lengthens a value: 1e15 becomes 1000000000000000.0.
_MOST_GROWTH = 6


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """The failed attempts of a message after `last`; the record outlives its worker.

    The record is the value of ``failing`` in the queue node, or of ``blocked`` while the queue
    waits for an operator.
    """

    position: int
    # The number of attempts that failed or ended with their process.
    attempts: int
    # The error of the last attempt, as one line.
    error: str = ""
    # Whether the last attempt ended with its process.
    crashed: bool = False
    # The earliest Unix time of the next attempt; 0 for any time.
    retry_at: float = 0.0
    # The Unix time since which the queue has been blocked; 0 if it is not blocked. If `retry_at` is
    # also set, the worker cannot decrypt the message, and runs it when the key is available.
    blocked_since: float = 0.0
    # The operator's decision: "", "skip" or "dead-letter".
    decision: str = ""
    # The time in seconds from the last attempt to `retry_at`; 0 if unknown. Even after a change of
    # the clock, the worker waits no longer than this.
    retry_delay: float = 0.0
    # The workers that began the message's last attempts. The last worker recorded this list before
    # its attempt began. The next owner counts these attempts, or has counted them.
    begun_by: tuple[str, ...] = ()

    @property
    def blocked(self) -> bool:
        return self.blocked_since > 0

    @property
    def only_begun(self) -> bool:
        """Whether the record has only begun attempts and no counted attempts."""
        return bool(self.begun_by) and not self.attempts

    @property
    def held(self) -> bool:
        """Whether the queue waits for an operator, and not for a missing key."""
        return self.blocked and not self.retry_at

    @classmethod
    def parse(cls, value: Any) -> FailureRecord | None:
        """Parse a record; return None if it is unreadable, so attempts count from 1 again."""
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
            string_tuple(value.get("begun_by")),
        )

    def interrupted(self, reason: str, attempts: int = 1) -> FailureRecord:
        """Return the record with more attempts, which ended with their process or session."""
        if self.blocked or self.decision:
            return self  # an operator must decide, or has decided
        error = reason[:FAILURE_ERROR_CHARACTERS]
        return FailureRecord(self.position, self.attempts + attempts, error, crashed=True)

    def left_by(self, owner: str) -> FailureRecord:
        """Return the record with all begun attempts counted, because the owner is lost."""
        if self.begun_by[-1:] != (owner,):
            return self
        before = f"{self.error}, " if self.error.startswith(OWNERS_GONE) else OWNERS_GONE
        counted = self.interrupted(before + ", ".join(self.begun_by), len(self.begun_by))
        return replace(counted, begun_by=self.begun_by)

    def dump(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "position": str(self.position),
            "attempts": self.attempts,
            "error": self.error[:FAILURE_ERROR_CHARACTERS],
        }
        for name in ("crashed", "retry_at", "retry_delay", "blocked_since", "decision"):
            if getattr(self, name):
                value[name] = getattr(self, name)
        if self.begun_by:
            value["begun_by"] = list(self.begun_by)
        return value


def _moment(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e12 else 0.0


class CancelOutcome(Enum):
    """The result of an attempt to cancel a message before it begins."""

    CANCELLED = "cancelled"
    ALREADY = "already-cancelled"
    STARTED = "started"
    FAILING = "failing"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class OutOfOrderProgress:
    """The progress beyond `last` of a queue that workers do not process strictly in order.

    The queue node stores three values. ``done_ranges`` has two numbers for each range of done
    messages. The first number is the distance from the previous range, or from `last`, to the
    range's first message. The second number is the distance from the first to the newest message of
    the range. ``other_failures`` has failure records like ``failing``. ``cancelled`` has the
    positions of messages that an operator has cancelled. Each position is stored as the distance
    from the previous position, or from `last`.
    """

    # The first and newest position of each range of done messages, ascending.
    done_ranges: tuple[tuple[int, int], ...] = ()
    # The records of failing messages, without the node's `failure`.
    other_failures: tuple[FailureRecord, ...] = ()
    # The positions of messages that must not start, ascending.
    cancelled: tuple[int, ...] = ()

    @classmethod
    def parse(
        cls, last: int, ranges: Any, failures: Any, cancelled: Any = None
    ) -> OutOfOrderProgress | None:
        """Parse the stored values; omit unreadable parts, so that the messages run again."""
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
        return bool(self.done_ranges or self.other_failures or self.cancelled)

    def is_done(self, position: int) -> bool:
        return any(first <= position <= newest for first, newest in self.done_ranges)

    def with_cancelled(self, positions: Iterable[int]) -> OutOfOrderProgress:
        return replace(self, cancelled=tuple(sorted({*self.cancelled, *positions})))

    def dump(self, last: int) -> dict[str, Any]:
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
    progress: OutOfOrderProgress | None, failures: Iterable[FailureRecord], done: int, position: int
) -> CancelOutcome:
    """Return the outcome of cancelling a message; all messages up to `done` are done."""
    if position <= done:
        return CancelOutcome.DONE
    if progress is not None and position in progress.cancelled:
        return CancelOutcome.ALREADY  # the message never started, even if it counts as done
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
    """Return a position and None; if the text is unreadable, return 0 and the reason."""
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text <= most:
        return text, None
    if not isinstance(text, str):
        return 0, f"last must be a decimal string, got {shown(text)}"
    digits = text.strip().removesuffix("L").strip()  # old writers append an L
    if not digits:
        return 0, None if not text.strip() else f"last must be a decimal string, got {shown(text)}"
    if not (digits.isascii() and digits.isdigit()):
        return 0, f"last must be a decimal string, got {shown(text)}"
    # Check the length first, because Python cannot parse thousands of digits.
    if len(digits) > _MAX_DIGITS or int(digits) > most:
        return 0, f"last is larger than any position: {digits[:60]}"
    return int(digits), None


@dataclass(frozen=True, slots=True)
class QueueNode:
    """The progress of a queue, and its owner."""

    # The position up to which all messages are done; 0 before the first message.
    last: int = 0
    # The name of the owner's worker node; "" for a free queue, or if no znode can have the name.
    owner: str = ""
    # The number of operators' changes of the node.
    seek: int = 0
    # The broker-specific position, if the broker's positions are not times.
    position: str | None = None
    # Whether the queue is marked as deleted, so that no worker claims it.
    deleted: bool = False
    # The reason why workers cannot read or write the node, and so do not process the queue; or
    # None.
    fault: str | None = None
    # The failure record of a message after `last`; None without a failing message.
    failure: FailureRecord | None = None
    # The keys of other tools, which qdo keeps unchanged.
    extra: tuple[tuple[str, Any], ...] = ()
    # The progress beyond `last`; None if workers process messages strictly in order.
    out_of_order: OutOfOrderProgress | None = None
    # The names of done messages that the broker may deliver again; see `Subscription.unconfirmed`.
    unconfirmed: tuple[str, ...] = ()
    # The number of operators' changes that did not move the queue back. The owner keeps its
    # progress.
    onward: int = 0

    @property
    def blocking(self) -> tuple[FailureRecord, ...]:
        """The records of messages that wait for an operator, by position."""
        return tuple(each for each in self.failures if each.blocked)

    @property
    def retrying(self) -> tuple[FailureRecord, ...]:
        """The records of messages that wait for their next attempt, by position."""
        return tuple(each for each in self.failures if not each.blocked and not each.decision)

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The records of all failing messages, by position."""
        others = () if self.out_of_order is None else self.out_of_order.other_failures
        return others if self.failure is None else (self.failure, *others)

    @classmethod
    def parse(cls, data: bytes | None, refused: str | None = None) -> QueueNode:
        """Parse a node without raising errors; if it is unreadable, `fault` has the reason.

        :param refused: the reason why the coordinator did not return the data, or None.
        """
        if refused is not None:
            return cls(fault=refused)
        size = 0 if data is None else len(data)
        if data is not None and size > MAX_VALUE_BYTES and not is_flat(data):
            return cls(fault=_too_long(size))
        value, fault = load(data)
        if not value:
            return cls(fault=fault)
        if size * _MOST_GROWTH > MAX_QUEUE_BYTES:
            size = max(size, len(encode(value)))
        last, fault = parse_last(value.pop("last", ""))
        owner = value.pop("owner", "")
        seek = value.pop("seek", 0)
        onward = value.pop("onward", 0)
        position = value.pop("position", None)
        deleted = value.pop("deleted", False)
        failing = value.pop("failing", None)
        blocked = value.pop("blocked", None)
        failure = FailureRecord.parse(blocked if blocked is not None else failing)
        out_of_order = OutOfOrderProgress.parse(
            last,
            value.pop("done_ranges", None),
            value.pop("other_failures", None),
            value.pop("cancelled", None),
        )
        unconfirmed = string_tuple(value.pop("unconfirmed", None))
        if size > MAX_QUEUE_BYTES:
            # Drop the keys of other tools, so that a seek or the owner can repair the node.
            value.clear()
            fault = _too_long(size)
        return cls(
            last=last,
            owner=owner if isinstance(owner, str) and is_path_part(owner) else "",
            seek=_count(seek),
            position=position if isinstance(position, str) else None,
            deleted=bool(deleted),
            fault=fault,
            failure=failure if failure is not None and failure.position > last else None,
            extra=tuple(value.items()),
            out_of_order=out_of_order,
            unconfirmed=unconfirmed,
            onward=_count(onward),
        )

    def checked(self, positions: Positions) -> QueueNode:
        """Return the node; set `fault` if its `position` is not valid for the broker."""
        if positions is not TIME_POSITIONS and self.fault is None:
            try:
                positions.resume_after(self.last, self.position)
            except ValueError as error:
                return replace(self, fault=f"cannot read the position: {error}")
        return self

    def encode(self) -> bytes:
        value: dict[str, Any] = {"last": str(self.last) if self.last else ""}
        if self.owner:
            value["owner"] = self.owner
        if self.seek:
            value["seek"] = self.seek
        if self.onward:
            value["onward"] = self.onward
        if self.position is not None:
            value["position"] = self.position
        if self.deleted:
            value["deleted"] = True
        if self.failure is not None:
            value["blocked" if self.failure.blocked else "failing"] = self.failure.dump()
        if self.out_of_order is not None:
            value.update(self.out_of_order.dump(self.last))
        if self.unconfirmed:
            value["unconfirmed"] = list(self.unconfirmed)
        value.update(self.extra)
        return encode(value)

    def owned_by(self, worker: str) -> QueueNode:
        return replace(self, owner=worker)

    def claimed_by(self, worker: str) -> QueueNode:
        """Return the node with a new owner, and count the attempts that a lost owner had begun."""
        former = self.owner
        node = self.owned_by(worker)
        if former in ("", worker) or not any(each.begun_by for each in self.failures):
            return node
        failure = None if self.failure is None else self.failure.left_by(former)
        above = self.out_of_order
        if above is not None:
            others = tuple(each.left_by(former) for each in above.other_failures)
            above = replace(above, other_failures=others)
        return replace(node, failure=failure, out_of_order=above)

    def moved_to(
        self, last: int, position: str | None = None, done: int | None = None
    ) -> QueueNode:
        """Return the node with another `last`, and without a failure record before it.

        :param done: `last` as a broker-specific position, if positions are not times.
        """
        failure = self.failure
        done = last if done is None else done
        # Drop progress beyond the old `last`; the caller sets it again. Avoid `replace`, which
        # takes three times as long, or 6 % of a checkpoint.
        return QueueNode(
            last,
            self.owner,
            self.seek,
            position,
            self.deleted,
            self.fault,
            failure if failure is None or failure.position > done else None,
            self.extra,
            onward=self.onward,
        )

    def continues(self, before: QueueNode) -> bool:
        """Return whether no change since an older node moved the queue back."""
        return self.seek - before.seek == self.onward - before.onward

    def decisions_since(self, before: QueueNode) -> dict[int, FailureRecord | None]:
        """Return operators' decisions since an older node, by position; None for a retry."""
        known = {each.position: each for each in before.failures}
        found = {each.position: each for each in self.failures}
        if not self.continues(before) or self._place() != before._place():
            return {}  # other values changed too
        changed = {
            each for each in known.keys() | found.keys() if known.get(each) != found.get(each)
        }
        decisions = {each: found.get(each) for each in sorted(changed)}
        return {at: each for at, each in decisions.items() if each is None or each.decision}

    def _place(self) -> tuple[object, ...]:
        """Return the values, other than failures, that determine where an owner continues."""
        above = self.out_of_order or OutOfOrderProgress()
        return self.last, self.position, self.deleted, above.done_ranges, above.cancelled

    def with_failure(self, failure: FailureRecord | None) -> QueueNode:
        """Return the node with a failure record, unless the record's message is done."""
        kept = failure if failure is None or failure.position > self.last else None
        return self if kept == self.failure else replace(self, failure=kept)


# The state of a queue without a node.
NEW = QueueNode()


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= MAX_LAST else 0


def _too_long(size: int) -> str:
    return f"the value must be at most {MAX_QUEUE_BYTES} bytes, got {size}"
