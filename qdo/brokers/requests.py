"""Requests as every broker stores them: rows that any worker takes, and that end once.

=======  ============================================================  ==========================
state    meaning                                                       next
=======  ============================================================  ==========================
waiting  no worker has it; it may be taken once it is due              running (take), over
running  the worker `owner` runs it                                    paused, waiting (put back,
                                                                       give back), over
paused   its job waits for `resume`, on the same worker                running, waiting, over
over     it has an outcome; unless it failed, `until` ends it          waiting (an operator's retry)
=======  ============================================================  ==========================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from qdo.encoding import decoded_headers
from qdo.message import NORMAL

WAITING, RUNNING, PAUSED, OVER = range(4)
# The names of the states, by number.
STATES = ("waiting", "running", "paused", "over")
# What a request that is over may have as its outcome.
OUTCOMES = ("done", "failed", "skipped", "cancelled")
# Its requests are kept until an operator retries or discards them, as dead letters are.
FAILED = "failed"
PAUSED_MARK = '{"paused"'
# A body or a result as it is stored, with its headers (JSON object of str to str, or None).
Content = tuple[bytes, "str | None"]
NO_CONTENT: Content = (b"", None)


class Take(NamedTuple):
    """One run of a request: what its worker reports counts as long as no other took it."""

    id: str
    # Name of the worker, "" for a request that waits.
    owner: str
    # How often the request was taken.
    number: int

    @property
    def header(self) -> str:
        """The header that carries it to the job, also into a job's process."""
        return f"{self.number} {self.owner}"

    @classmethod
    def of_header(cls, id: str, text: str) -> Take | None:
        """Return the take of a request's header; None for any other message."""
        number, _, owner = text.partition(" ")
        return cls(id, owner, int(number)) if owner and number.isdigit() else None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to store."""

    pool: str
    id: str
    content: Content
    # Of pool and body as they were given; it tells whether a known `id` has the same.
    digest: bytes
    priority: int = NORMAL
    # Unix time in seconds before which it is not taken; 0: at once; below 0: so many seconds from
    # now, by the clock of the store.
    due: float = 0.0
    # JSON object that the store keeps for those who end it, or None.
    reply: str | None = None
    # How long it is kept once it is over.
    keep_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request in the hands of a worker."""

    take: Take
    pool: str
    content: Content
    priority: int
    # Number of attempts that count as failed.
    failed: int
    # Whether the last attempt ended with its worker.
    crashed: bool
    # Of the last failed attempt, or None.
    error: str | None
    # Unix time in seconds at which it was stored.
    asked: float
    reply: str | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to `RequestStore.take`."""

    requests: Sequence[TakenRequest] = ()
    # The marks of this worker's requests of the pool that have one, by id.
    marks: Mapping[str, str] = field(default_factory=dict)
    # Unix time in seconds, by the clock of this machine, at which the next waiting request of the
    # pool is due, None without any; in the past if all places were filled and there may be more. It
    # says nothing after a take without places.
    next_due: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as it is stored; times are Unix times in seconds."""

    take: Take
    pool: str
    state: int
    content: Content
    priority: int
    asked: float
    due: float
    failed: int
    # When it was taken, 0 if never.
    started: float
    note: str | None
    error: str | None
    # JSON object: ``{"cancel": reason}``; while it is paused ``{"paused": time}``, which names the
    # question that its job asks, and then ``{"resume": value}``; None without any.
    mark: str | None
    reply: str | None
    # One of `OUTCOMES`; None until it is over.
    outcome: str | None
    # For how many seconds after its end another request cannot have its id.
    keep: float
    # When that time ends, 0 until it is over. It is deleted then, unless it has failed.
    until: float
    result: Content | None

    @property
    def id(self) -> str:
        return self.take.id

    @property
    def ended(self) -> float:
        """When it ended, as a Unix time in seconds; 0.0 until it is over."""
        return max(0.0, self.until - self.keep)

    @property
    def is_cancelled(self) -> bool:
        """Whether its worker is told to cancel it."""
        return self.state != OVER and "cancel" in (decoded_headers(self.mark) or {})

    @property
    def asks(self) -> bool:
        """Whether its job waits for an answer that has not been given yet."""
        return self.state == PAUSED and (self.mark or PAUSED_MARK).startswith(PAUSED_MARK)


# The columns of both, in the order of their fields; contents and takes have several columns each.
TAKEN_FIELDS = tuple(each.name for each in fields(TakenRequest)[3:])
RECORD_FIELDS = tuple(
    each.name for each in fields(RequestRecord) if each.name not in ("take", "content", "result")
)


def record_of(id: str, owner: str, number: int, *columns: Any) -> RequestRecord:
    """Return the record of a row: a take, `RECORD_FIELDS`, and headers and body of both contents.

    :param columns: a body that was not read, and a result that does not exist, are None.
    """
    *values, headers, body, result_headers, result = columns
    return RequestRecord(
        Take(id, owner, number),
        **dict(zip(RECORD_FIELDS, values, strict=True)),
        content=NO_CONTENT if body is None else (body, headers),
        result=None if result is None else (result, result_headers),
    )


def taken_of(owner: str, pool: str, id: str, number: int, *columns: Any) -> TakenRequest:
    """Return the request of a row: `TAKEN_FIELDS`, and headers and body."""
    *values, headers, body = columns
    found = dict(zip(TAKEN_FIELDS, values, strict=True))
    found["crashed"] = bool(found["crashed"])
    return TakenRequest(Take(id, owner, number), pool, (body, headers), **found)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many requests of a pool are not over, and how many have failed and are kept."""

    waiting: int
    running: int
    paused: int
    # Unix time in seconds since which the oldest due request waits, None without any.
    oldest: float | None
    failed: int = 0
