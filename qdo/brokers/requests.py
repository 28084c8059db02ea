"""Requests and their states. Any worker may take a request, and each request ends exactly once.

=======  ============================================================  ==========================
state    meaning                                                       next
=======  ============================================================  ==========================
waiting  no worker has it; it may be taken once it is due              running (take), over
running  the worker `owner` runs it                                    paused, waiting (put back,
                                                                       give back), over
paused   its job waits for `resume`, on the same worker                running, waiting, over
paused   without an owner: it waits for `resume`, or for its steps     over, waiting
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
# The state of `RequestStore.note` that lets go of a request until its steps are over.
IN_STEPS = 4
# The names of the states, by number.
STATES = ("waiting", "running", "paused", "over")
# The possible outcomes of a request that is over.
OUTCOMES = ("done", "failed", "skipped", "cancelled")
# The outcome of requests that the store keeps, like dead letters, until an operator acts on them.
FAILED = "failed"
PAUSED_MARK = '{"paused"'
# A stored body or result, with its headers (a JSON object of str to str, or None).
Content = tuple[bytes, "str | None"]
NO_CONTENT: Content = (b"", None)


class Take(NamedTuple):
    """One run of a request. The worker's reports are valid until the next take."""

    id: str
    # The name of the worker; "" for a waiting request.
    owner: str
    # The number of takes of the request so far.
    number: int

    @property
    def header(self) -> str:
        """The value of the header that passes the take to the job and to a job's process."""
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
    # A digest of pool and body, to compare the request with a stored request with the same `id`.
    digest: bytes
    priority: int = NORMAL
    # The Unix time before which no worker takes the request. 0: at once. A negative value is a
    # delay in seconds by the clock of the store.
    due: float = 0.0
    # A JSON object that the store keeps for the process that ends the request, or None.
    reply: str | None = None
    # The time for which the store keeps the request after its end.
    keep_seconds: float = 3600.0
    # The id of the request whose job asks for this request as a step; see `qdo.requests.steps`.
    parent: str | None = None
    # The Unix time at which the leader cancels the request; 0: never. Negative as in `due`.
    deadline: float = 0.0
    # Whether no worker takes the request, because `Handle.resume` ends it.
    paused: bool = False


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
    # The Unix time in seconds at which the store received the request.
    asked: float
    reply: str | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of `RequestStore.take`."""

    requests: Sequence[TakenRequest] = ()
    # The marks of this worker's marked requests in the pool, by id.
    marks: Mapping[str, str] = field(default_factory=dict)
    # The Unix time, by the clock of this machine, at which the next waiting request of the pool is
    # due; None without waiting requests. A past time means that the take filled all places and more
    # requests may be due. After a take without places, the value has no meaning.
    next_due: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A stored request. All times are Unix times in seconds."""

    take: Take
    pool: str
    state: int
    content: Content
    priority: int
    asked: float
    due: float
    failed: int
    # The time at which a worker took the request; 0 if no worker has taken it.
    started: float
    note: str | None
    error: str | None
    # A JSON object; None without a mark. ``{"cancel": reason}`` cancels the request. A paused
    # request has ``{"paused": time}``, which identifies the question of its job, and after an
    # answer ``{"resume": value}``.
    mark: str | None
    reply: str | None
    # One of `OUTCOMES`; None until the request is over.
    outcome: str | None
    # The time in seconds, after the end of the request, in which no other request can have its id.
    keep: float
    # The end of the time `keep`; 0 until the request is over. Then the store deletes the request,
    # unless it failed.
    until: float
    # See `NewRequest`. The store keeps a step until it deletes the request `parent`.
    parent: str | None
    deadline: float
    result: Content | None

    @property
    def id(self) -> str:
        return self.take.id

    @property
    def ended(self) -> float:
        """The Unix time in seconds of the request's end; 0.0 until the request is over."""
        return max(0.0, self.until - self.keep)

    @property
    def is_cancelled(self) -> bool:
        """Whether the worker must cancel the request."""
        return self.state != OVER and "cancel" in (decoded_headers(self.mark) or {})

    @property
    def asks(self) -> bool:
        """Whether the request is paused and its job still waits for an answer."""
        is_asked = (self.mark or PAUSED_MARK).startswith(PAUSED_MARK)
        return self.state == PAUSED and is_asked and not self.in_steps

    @property
    def in_steps(self) -> bool:
        """Whether the request has no owner, because its job waits for its steps."""
        return self.state == PAUSED and not self.take.owner and self.take.number > 0


# The columns of records and of taken requests in field order, without contents and takes.
TAKEN_FIELDS = tuple(each.name for each in fields(TakenRequest)[3:])
RECORD_FIELDS = tuple(
    each.name for each in fields(RequestRecord) if each.name not in ("take", "content", "result")
)


def record_of(id: str, owner: str, number: int, *columns: Any) -> RequestRecord:
    """Return the record for a row: a take, `RECORD_FIELDS`, and headers and body of both contents.

    :param columns: the other columns; None for an unread body or a missing result.
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
    """The numbers of a pool's unfinished requests by state, and of its failed requests."""

    waiting: int
    running: int
    paused: int
    # The Unix time since which the oldest due request has waited; None without due requests.
    oldest: float | None
    failed: int = 0
