"""Dead letters, and the interface of their stores."""

from __future__ import annotations

import abc
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from qdo.encoding import ID, RETRIED, parsed, with_header
from qdo.errors import FailureKind, QdoError
from qdo.positions import LATEST_SECONDS
from qdo.queues import name_error
from qdo.refusals import failure_kind

if TYPE_CHECKING:
    from qdo.brokers.outgoing import Outgoing
    from qdo.encryption.marks import IdMarks

log = logging.getLogger(__name__)
# Every position is below this number.
_MAX_NUMBER = 1 << 320


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """A message whose last attempt failed, with the error."""

    queue: str
    position: int
    body: bytes
    key: str | None
    headers: str | None
    error: str
    traceback: str
    attempts: int
    worker: str
    fence: int
    # The time of death, as Unix time in seconds.
    dead_at: float = field(default=0.0)

    def entry(self) -> DeadLetterEntry:
        names = [each.name for each in fields(DeadLetterEntry)[:-1]]
        shared = {name: getattr(self, name) for name in names}
        return DeadLetterEntry(**shared, body_bytes=len(self.body))


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """A dead letter without its body and traceback, which may be large."""

    queue: str
    position: int
    key: str | None
    headers: str | None
    error: str
    attempts: int
    worker: str
    fence: int
    dead_at: float
    body_bytes: int


_Letter = TypeVar("_Letter", DeadLetterRecord, DeadLetterEntry)


class DeadLetterStore(abc.ABC):
    """The dead letters of a broker's queues.

    :ivar marks: a function that returns the marks that prove the id in a message's header; None if
        ids need no proof. Reads do not call this function, because some readers of dead letters may
        not read the keys.
    """

    marks: Callable[[], IdMarks | None] | None = None

    @abc.abstractmethod
    def store(self, record: DeadLetterRecord) -> None:
        """Store a dead letter durably, unless the store has one at the same position."""

    @abc.abstractmethod
    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        """Return the dead letters of one or all queues, oldest first."""

    def get(self, queue: str, position: int) -> DeadLetterRecord | None:
        """Return one dead letter; None if it does not exist."""
        found = (each for each in self.records(queue) if each.position == position)
        return next(found, None)

    def counts(self) -> Mapping[str, int]:
        """Return the number of dead letters by queue; omit queues without dead letters."""
        return Counter(record.queue for record in self.records())

    def total(self) -> int:
        """Return the number of dead letters, which may be approximate."""
        return sum(self.counts().values())

    def find(
        self,
        queue: str | None = None,
        *,
        error: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[DeadLetterEntry]:
        """Return the dead letters of one or all queues without bodies, oldest first.

        :param error: text that the error contains; case does not matter.
        :param since: Unix time; return only messages that died between `since` and `until`,
            inclusive.
        """
        entries = (record.entry() for record in self.records(queue))
        return [each for each in entries if matches(each, error, since, until)]

    def prune(self, queue: str, *, keep: int | None = None, before: float | None = None) -> int:
        """Delete the oldest dead letters of a queue permanently; return their number.

        :param keep: the maximum number of dead letters to keep; delete the oldest messages first.
        :param before: Unix time; also delete the dead letters of messages that died earlier.
        """
        found = sorted(self.find(queue), key=lambda entry: entry.position)
        newest = len(found) if keep is None else keep
        keys = [
            (entry.queue, entry.position)
            for index, entry in enumerate(reversed(found))
            if index >= newest or (before is not None and entry.dead_at < before)
        ]
        return sum(self.discard(keys))

    @abc.abstractmethod
    def retry(self, keys: Sequence[tuple[str, int]]) -> list[int | None]:
        """Move all given dead letters to the ends of their queues in the given order, or none.

        One transaction stores each dead letter as a message and removes the dead letter. The
        message keeps its id, and gets a header with the number of its retries; see `qdo.headers`.

        :param keys: the queue and position of each dead letter.
        :return: the new position of each message; None for a missing dead letter.
        """

    @abc.abstractmethod
    def discard(self, keys: Sequence[tuple[str, int]]) -> list[bool]:
        """Delete dead letters permanently; return for each whether it existed."""

    def headers_again(self, letter: DeadLetterRecord, own_id: str) -> str | None:
        """Return the headers of the message that retries a dead letter; see `retried_headers`."""
        marks = None if self.marks is None else self.marks()
        if marks is None:
            return retried_headers(letter.headers, own_id)
        proven = marks.proven(letter.queue, letter.headers, letter.body)
        return marks.marked(letter.queue, retried_headers(proven, own_id), letter.body)


class SqlDeadLetters(DeadLetterStore):
    """Reads dead letters from a SQL table.

    :cvar queries: the queries for whole dead letters, for entries, and for the counts by queue.
    :param read: a function that returns the rows of a query; it adds the app to the parameters.
    """

    queries: ClassVar[tuple[Any, Any, Any]]

    def __init__(self, read: Callable[..., list[Any]]) -> None:
        self._read = read

    def records(self, queue: str | None = None) -> list[DeadLetterRecord]:
        found = self._read(self.queries[0], queue=queue, position=None)
        return list(map(_dated, itertools.starmap(DeadLetterRecord, found)))

    def get(self, queue: str, position: int) -> DeadLetterRecord | None:
        found = self._read(self.queries[0], queue=queue, position=position)
        return _dated(DeadLetterRecord(*found[0])) if found else None

    def find(
        self,
        queue: str | None = None,
        *,
        error: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[DeadLetterEntry]:
        found = self._read(self.queries[1], queue=queue, since=since, until=until)
        # SQLite ignores case only for ASCII characters.
        entries = map(_dated, itertools.starmap(DeadLetterEntry, found))
        return [each for each in entries if matches(each, error, None, None)]

    def counts(self) -> dict[str, int]:
        return dict(self._read(self.queries[2]))


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dead letter from its stored JSON, with the types of the record."""
    # Other programs may write to the store, so check every field. A ValueError, KeyError or
    # TypeError means that the JSON is not a dead letter.
    texts = {name: _text(fields[name]) for name in ("queue", "error", "worker")}
    if reason := name_error(texts["queue"]):
        raise ValueError(f"queue: {reason}")
    numbers = {name: _number(fields[name]) for name in ("position", "attempts", "fence")}
    try:
        dead_at = float(fields["dead_at"])
    except OverflowError as error:  # an integer of more than 308 digits
        raise ValueError("dead_at is not a time") from error
    if math.isnan(dead_at):
        raise ValueError("dead_at is not a number")
    return {**texts, **numbers, "dead_at": _with_date(dead_at)}


def _dated(letter: _Letter) -> _Letter:
    """Return a dead letter with a valid date, because its worker may have written any number."""
    if 0 <= letter.dead_at < LATEST_SECONDS:
        return letter
    return replace(letter, dead_at=_with_date(letter.dead_at))


def _with_date(seconds: float) -> float:
    return min(max(0.0, seconds), LATEST_SECONDS - 1)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not text: {value!r:.60}")
    value.encode()  # a UnicodeEncodeError is a ValueError
    return value


def _number(value: Any) -> int:
    if not isinstance(value, str | int) or not 0 <= int(value) < _MAX_NUMBER:
        raise ValueError(f"not a number of at least 0: {value!r:.60}")
    return int(value)


def refused_when_due(message: Outgoing, position: int, error: QdoError) -> DeadLetterRecord:
    """Return the dead letter for a delayed message that the store refuses, or raise the error."""
    # The store accepted the delayed message, but its queue may have become a shard since then. A
    # dead letter delays no other message. Raise an error with another cause.
    if failure_kind(error) is not FailureKind.REFUSED:
        raise error
    log.warning(
        "a delayed message of queue %s is a dead letter now: it was refused when it was due: %s",
        message.queue,
        error,
    )
    return DeadLetterRecord(
        queue=message.queue,
        position=position,
        body=message.body,
        key=message.key,
        headers=message.headers,
        error=f"refused when it was due: {error}",
        traceback="",
        attempts=0,
        worker="",
        fence=0,
    )


def matches(
    entry: DeadLetterEntry, error: str | None, since: float | None, until: float | None
) -> bool:
    """Return whether a dead letter passes the filters of `DeadLetterStore.find`."""
    return (
        (error is None or error.casefold() in entry.error.casefold())
        and (since is None or entry.dead_at >= since)
        and (until is None or entry.dead_at <= until)
    )


def retried_headers(headers: str | None, own_id: str) -> str | None:
    """Return the headers of a retried message, with its first id and its retry count."""
    # The retry sets a new send time, and does not delay the message again.
    known = parsed(headers) or {}
    before = known.get(RETRIED, "")
    times = int(before) if before.isascii() and before.isdecimal() and len(before) < 10 else 0
    return with_header(
        headers,
        qdo_id=known.get(ID, own_id),
        qdo_retried=str(times + 1),
        qdo_sent=None,
        qdo_due=None,
    )
