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

Each method is one transaction. A *take* names a request, the worker that took it and how often it
was taken: a number that only grows. Whatever an older take reports changes nothing. The message
that tells of an outcome is stored by the transaction that records the outcome.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qdo.brokers.outgoing import Outgoing
from qdo.encoding import decoded_headers, is_utf8, utf8_text
from qdo.errors import MessageTooLargeError, UnsupportedError, UsageError
from qdo.message import NORMAL
from qdo.queues import check_queue_name
from qdo.text import shorten

MAX_ID_CHARACTERS = 200
# Characters of a note, an error or a traceback.
MOST_TEXT = 200_000
EXPIRED_AT_ONCE = 1000
# A take is complete once its bodies have this size.
TAKEN_BYTES = 32 * 1024 * 1024
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
RECORD_FIELDS = (
    *("pool", "state", "priority", "asked", "due", "failed", "started"),
    *("note", "error", "mark", "reply", "outcome", "keep", "until"),
)


class Take(NamedTuple):
    """One run of a request: what its worker reports counts as long as no other took it.

    :ivar owner: name of the worker, "" for a request that waits.
    :ivar number: how often the request was taken.
    """

    id: str
    owner: str
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
    """A request to store.

    :ivar digest: of pool and body as they were given; it tells whether a known `id` has the same.
    :ivar due: Unix time in seconds before which it is not taken; 0: at once; below 0: so many
        seconds from now, by the clock of the store.
    :ivar reply: JSON object that the store keeps for those who end it, or None.
    :ivar keep_seconds: how long it is kept once it is over.
    """

    pool: str
    id: str
    content: Content
    digest: bytes
    priority: int = NORMAL
    due: float = 0.0
    reply: str | None = None
    keep_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request in the hands of a worker.

    :ivar failed: number of attempts that count as failed.
    :ivar crashed: whether the last attempt ended with its worker.
    :ivar error: of the last failed attempt, or None.
    :ivar asked: Unix time in seconds at which it was stored.
    """

    take: Take
    pool: str
    content: Content
    priority: int
    failed: int
    crashed: bool
    error: str | None
    asked: float
    reply: str | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to `RequestStore.take`.

    :ivar marks: the marks of this worker's requests of the pool that have one, by id.
    :ivar next_due: Unix time in seconds, by the clock of this machine, at which the next waiting
        request of the pool is due, None without any; in the past if all places were filled and
        there may be more. It says nothing after a take without places.
    """

    requests: Sequence[TakenRequest] = ()
    marks: Mapping[str, str] = field(default_factory=dict)
    next_due: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as it is stored; times are Unix times in seconds.

    :ivar mark: JSON object: ``{"cancel": reason}``; while it is paused ``{"paused": time}``, which
        names the question that its job asks, and then ``{"resume": value}``; None without any.
    :ivar started: when it was taken, 0 if never.
    :ivar outcome: one of `OUTCOMES`; None until it is over.
    :ivar keep: for how many seconds after its end another request cannot have its id.
    :ivar until: when that time ends, 0 until it is over. It is deleted then, unless it has failed.
    """

    take: Take
    pool: str
    state: int
    content: Content
    priority: int
    asked: float
    due: float
    failed: int
    started: float
    note: str | None
    error: str | None
    mark: str | None
    reply: str | None
    outcome: str | None
    keep: float
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
        """Whether its job waits for an answer that was not given yet."""
        return self.state == PAUSED and (self.mark or PAUSED_MARK).startswith(PAUSED_MARK)


def record_of(id: str, owner: str, number: int, *rest: Any) -> RequestRecord:
    """Return the record of a row: a take, `RECORD_FIELDS`, and headers and body of both contents.

    :param rest: a body that was not read, and a result that does not exist, are None.
    """
    *values, headers, body, result_headers, result = rest
    return RequestRecord(
        Take(id, owner, number),
        **dict(zip(RECORD_FIELDS, values, strict=True)),
        content=NO_CONTENT if body is None else (body, headers),
        result=None if result is None else (result, result_headers),
    )


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many requests of a pool are not over, and how many have failed and are kept.

    :ivar oldest: Unix time in seconds since which the oldest due request waits, None without any.
    """

    waiting: int
    running: int
    paused: int
    oldest: float | None
    failed: int = 0


def check_requests(requests: Sequence[NewRequest], most: int) -> int:
    """Return the size of all bodies; raise an error if a store must refuse one of the requests.

    :param most: the largest body that the broker stores.
    """
    for each in requests:
        check_queue_name(each.pool)
        if not 1 <= len(each.id) <= MAX_ID_CHARACTERS:
            raise UsageError(
                reason=f"the id of a request of pool {each.pool!r} must have 1 to "
                f"{MAX_ID_CHARACTERS} characters, got {len(each.id)}"
            )
        texts = {"id": each.id, "headers": each.content[1], "reply": each.reply}
        for word, text in texts.items():
            check_request_text(f"the {word} of a request of pool {each.pool!r}", text)
    return sum(check_content(each.pool, each.content, most) for each in requests)


def check_content(pool: str, content: Content | None, most: int) -> int:
    """Return the size of a body or result; raise MessageTooLargeError if it is above `most`."""
    size = 0 if content is None else len(content[0])
    if size > most:
        raise MessageTooLargeError(queue=pool, size=size, limit=most)
    return size


def check_request_text(subject: str, text: str | None) -> None:
    """Raise UsageError for text that not every store can keep."""
    if text is not None and ("\0" in text or not is_utf8(text)):
        raise UsageError(
            reason=f"{subject} must not contain NUL or surrogate characters, which brokers cannot "
            f"store, got {text!r}"
        )


def storable_text(text: str | None) -> str | None:
    """Return a note or error that can be stored: an attempt must be able to end."""
    return None if text is None else shorten(utf8_text(text).replace("\0", "\\x00"), MOST_TEXT)


def refuse_connection(connection: Any) -> None:
    """Raise UnsupportedError for a connection of the app: this broker is no database of apps."""
    if connection is not None:
        what = "ask in a transaction of the app"
        remedy = "give requests an app with a PostgreSQL broker"
        raise UnsupportedError(broker="this broker", what=what, remedy=remedy)


class RequestStore(abc.ABC):
    """The requests of one app. Safe to use from several threads.

    Each method raises UnreachableError if the broker does not answer, see `Broker.send`. It may
    have done its work even so; all but `ask` and `take` can be repeated.
    """

    @abc.abstractmethod
    def ask(self, requests: Sequence[NewRequest], connection: Any = None) -> list[bool]:
        """Store requests, all or none; return for each whether it was new.

        One that is over and past `until`, failed ones too, gives its id to the new one.

        :param connection: store them if, and only if, its transaction commits, as
            `Broker.send_within`.
        :raises RequestExistsError: a request of this id has another pool or body.
        :raises UnsupportedError: `connection` is given, and the broker is no database of apps.
        """

    @abc.abstractmethod
    def take(
        self, owner: str, pool: str, places: int, running: Collection[str], oldest: int = 0
    ) -> Taken:
        """Take due requests of a pool: at most `places`, by priority and then by age.

        It also returns the requests that this worker owns and does not run, because the answer to
        an earlier take was lost; they are taken again, and may be more than `places`. With
        `places` 0 it only returns these, and the marks. Further requests are left to the next take
        once the bodies have `TAKEN_BYTES`.

        :param running: ids of the pool's requests that the worker runs.
        :param oldest: how many of the places go to the oldest requests, whatever their priorities.
        """

    @abc.abstractmethod
    def note(
        self, take: Take, state: int, note: str | None, messages: Sequence[Outgoing] = ()
    ) -> bool:
        """Set a running or paused request to `RUNNING` or `PAUSED`, with a note; send messages.

        A pause makes a mark that no other pause has. Only the mark ``cancel`` outlives it.

        :return: whether the take is still valid; if not, nothing has changed.
        """

    @abc.abstractmethod
    def end(
        self,
        take: Take,
        outcome: str,
        result: Content | None = None,
        error: str | None = None,
        messages: Sequence[Outgoing] = (),
        failed: int | None = None,
    ) -> bool:
        """Record the outcome of a request, and send messages that tell of it.

        A request that waits is ended with the take of its record. The body is deleted if the
        outcome is "done".

        :param failed: number of its attempts that count as failed; None keeps the number.
        :return: whether this take has ended the request, now or by an earlier call.
        """

    @abc.abstractmethod
    def put_back(self, take: Take, failed: int, seconds: float, error: str | None) -> bool:
        """Let a running or paused request wait again; return whether the take was still valid.

        :param seconds: until it may be taken, by the clock of the store.
        :param error: None keeps that of an earlier attempt.
        """

    @abc.abstractmethod
    def retry(self, id: str) -> bool:
        """Let a request wait again that is over and still has its body; return whether it was.

        Its attempts are counted from 1. Its take gets another number: the end that it had does not
        end it.
        """

    @abc.abstractmethod
    def mark(self, id: str, mark: str, asked: str | None = None) -> bool:
        """Cancel a running or paused request, or answer a paused one; return whether it is one.

        :param asked: the mark of the question that the answer is for: it answers no other.
        """

    @abc.abstractmethod
    def owners(self) -> list[str]:
        """Return the names of the workers that own requests."""

    @abc.abstractmethod
    def give_back(self, owner: str) -> int:
        """Let all requests of a worker that is gone wait again, each with one more failed attempt.

        The error of that attempt names the worker.

        :param owner: its name is never used again. Nothing is decided about attempts here.
        :return: the number of requests.
        """

    @abc.abstractmethod
    def find(self, id: str, *, whole: bool = True) -> RequestRecord | None:
        """Return a request, None if it does not exist.

        :param whole: with its body; a result is always there.
        """

    @abc.abstractmethod
    def records(
        self,
        pool: str | None = None,
        states: Collection[int] = (),
        limit: int = 1000,
        *,
        newest: bool = False,
        outcome: str | None = None,
    ) -> list[RequestRecord]:
        """Return requests without their bodies and results, the oldest first.

        :param states: only these; all without any.
        :param newest: the newest first.
        :param outcome: of `OUTCOMES`: only those that are over and have it.
        """

    @abc.abstractmethod
    def due(self, owner: str = "", running: Collection[str] = ()) -> dict[str, float]:
        """Return the pools in which a worker may find requests, each with `Taken.next_due`.

        These are the pools with requests that wait, and those with requests that the worker owns
        and does not run.

        :param running: ids of the requests that the worker runs.
        """

    @abc.abstractmethod
    def counts(self) -> dict[str, PoolCounts]:
        """Return the numbers of each pool with requests that are not over, or have failed."""

    @abc.abstractmethod
    def expire(self, failed: Sequence[str] = ()) -> int:
        """Delete requests that are over and past `until`, at most 1,000; return their number.

        Those that have failed stay.

        :param failed: ids: delete those of them that have failed, and nothing else.
        """

    @abc.abstractmethod
    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` soon after a request may be taken or was marked; return a way to stop.

        A thread or greenlet of the broker calls it. It may be called without reason. A process
        that dies may leave out a call: look once a second as well.
        """
