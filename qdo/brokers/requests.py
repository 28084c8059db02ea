"""Requests as every broker stores them: rows that any worker takes, and that end exactly once.

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
# The possible outcomes of a request that is over.
OUTCOMES = ("done", "failed", "skipped", "cancelled")
# The outcome of requests that are kept, like dead letters, until an operator acts on them.
FAILED = "failed"
PAUSED_MARK = '{"paused"'
# A body or a result as it is stored, with its headers (JSON object of str to str, or None).
Content = tuple[bytes, "str | None"]
NO_CONTENT: Content = (b"", None)


class Take(NamedTuple):
    """One run of a request. Its worker's reports are valid until another take."""

    id: str
    # The name of the worker, "" for a waiting request.
    owner: str
    # The number of times that the request was taken.
    number: int

    @property
    def header(self) -> str:
        """The header that carries the take to the job, also into a job's process."""
        return f"{self.number} {self.owner}"

    @classmethod
    def of_header(cls, id: str, text: str) -> Take | None:
        """Return the take in a request's header; None for any other message."""
        number, _, owner = text.partition(" ")
        return cls(id, owner, int(number)) if owner and number.isdigit() else None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to store."""

    pool: str
    id: str
    content: Content
    # The digest of the given pool and body, to compare them with those of a known `id`.
    digest: bytes
    priority: int = NORMAL
    # Unix time in seconds before which no worker takes the request. 0: at once; negative: a delay
    # in seconds, by the clock of the store.
    due: float = 0.0
    # JSON object that the store keeps for the process that ends the request, or None.
    reply: str | None = None
    # How long the store keeps the request once it is over.
    keep_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request that a worker has taken."""

    take: Take
    pool: str
    content: Content
    priority: int
    # The number of attempts that count as failed.
    failed: int
    # Whether the last attempt ended because its worker died.
    crashed: bool
    # The error of the last failed attempt, or None.
    error: str | None
    # The Unix time in seconds at which the request was stored.
    asked: float
    reply: str | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to `RequestStore.take`."""

    requests: Sequence[TakenRequest] = ()
    # The marks of this worker's marked requests in the pool, by id.
    marks: Mapping[str, str] = field(default_factory=dict)
    # The time at which the next waiting request of the pool is due, None without one: Unix time in
    # seconds by the clock of this machine. It is in the past if all places were filled and more
    # requests may be due. It has no meaning after a take without places.
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
    # The time at which a worker took the request, 0 if never.
    started: float
    note: str | None
    error: str | None
    # JSON object: ``{"cancel": reason}``. For a paused request ``{"paused": time}``, which names
    # the question of its job, and then ``{"resume": value}``. None without a mark.
    mark: str | None
    reply: str | None
    # One of `OUTCOMES`; None until it is over.
    outcome: str | None
    # The number of seconds after its end during which no other request can have its id.
    keep: float
    # The end of that time, 0 until the request is over. A request that has not failed is then
    # deleted.
    until: float
    result: Content | None

    @property
    def id(self) -> str:
        return self.take.id

    @property
    def ended(self) -> float:
        """The time of its end, as Unix time in seconds; 0.0 until it is over."""
        return max(0.0, self.until - self.keep)

    @property
    def is_cancelled(self) -> bool:
        """Whether its worker must cancel it."""
        return self.state != OVER and "cancel" in (decoded_headers(self.mark) or {})

    @property
    def asks(self) -> bool:
        """Whether its job still waits for an answer."""
        return self.state == PAUSED and (self.mark or PAUSED_MARK).startswith(PAUSED_MARK)


# The columns of records and of taken requests, in field order. Contents and takes have several.
TAKEN_FIELDS = tuple(each.name for each in fields(TakenRequest)[3:])
RECORD_FIELDS = tuple(
    each.name for each in fields(RequestRecord) if each.name not in ("take", "content", "result")
)


def record_of(id: str, owner: str, number: int, *columns: Any) -> RequestRecord:
    """Return the record for a row: a take, `RECORD_FIELDS`, and headers and body of both contents.

    :param columns: None stands for a body that was not read, and for a missing result.
    """
    *values, headers, body, result_headers, result = columns
    return RequestRecord(
        Take(id, owner, number),
        **dict(zip(RECORD_FIELDS, values, strict=True)),
        content=NO_CONTENT if body is None else (body, headers),
        result=None if result is None else (result, result_headers),
    )


def taken_of(owner: str, pool: str, id: str, number: int, *columns: Any) -> TakenRequest:
    """Return the request for a row: `TAKEN_FIELDS`, headers and body."""
    *values, headers, body = columns
    found = dict(zip(TAKEN_FIELDS, values, strict=True))
    found["crashed"] = bool(found["crashed"])
    return TakenRequest(Take(id, owner, number), pool, (body, headers), **found)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The numbers of a pool's requests that are not over, and of its kept failed requests."""

    waiting: int
    running: int
    paused: int
    # The Unix time in seconds since which the oldest due request has waited, None without one.
    oldest: float | None
    failed: int = 0
