"""Checks, stores, watches and cancels the requests of apps, and reads their results."""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qdo.bodies import loaded, plain_value
from qdo.brokers.base import Outgoing
from qdo.brokers.request_checks import MAX_ID_CHARACTERS, check_request_text
from qdo.brokers.requests import OVER, PAUSED, STATES, NewRequest, RequestRecord
from qdo.brokers.streams import keyless_error
from qdo.encoding import encoded, strict_json, with_header
from qdo.errors import (
    RequestCancelledError,
    RequestFailedError,
    RequestNotFoundError,
    RequestStateError,
    RequestTimeoutError,
    UsageError,
)
from qdo.message import NORMAL, Value
from qdo.queues import check_queue_name
from qdo.requests.replies import end_request, opened, store_end
from qdo.sending.messages import (
    Moment,
    TypeOf,
    body_and_kind,
    build_send_options,
    check_key,
    is_number,
    names_error,
    priority_text,
)
from qdo.sending.sender import Sender
from qdo.sending.streams import Stream
from qdo.system.twins import in_thread, twin, warn_if_blocking
from qdo.text import one_line, printable

if TYPE_CHECKING:
    from qdo.brokers.request_store import RequestStore


# Maximum size, as JSON, of a tag and of a value for `Handle.resume`.
MAX_VALUE_BYTES = 64 * 1024
MAX_KEEP_SECONDS = 366 * 86_400
FIRST_PAUSE_SECONDS = 0.001
# Maximum pause between two checks for a result.
LAST_PAUSE_SECONDS = 0.25
# The keys that a reply adds to the tag.
RESULT_KEYS = frozenset({"request", "take", "pool", "outcome", "result", "error"})


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """A request, with the parameters of `App.request`."""

    pool: str
    body: Any
    id: str | None = None
    then: str | Stream | None = None
    key: str | None = None
    tag: Mapping[str, Any] | None = None
    events: bool = False
    priority: int = NORMAL
    delay_seconds: float | None = None
    at: Moment | None = None
    keep_seconds: float = 3600.0
    kind: str | None = None
    deadline_seconds: float | None = None
    paused: bool = False


class Handle:
    """A request of an app, made by this process or another process.

    Methods raise RequestNotFoundError if the request has expired or never existed.
    """

    __slots__ = ("_sender", "id")

    def __init__(self, sender: Sender, id: str) -> None:
        self._sender = sender
        self.id = id

    @property
    def state(self) -> str:
        """The current state: "waiting", "running", "paused" or "over"."""
        warn_if_blocking()
        return STATES[self._record().state]

    async def astate(self) -> str:
        """Return `state`, without blocking the loop of the coroutine."""
        return await in_thread(lambda: self.state)

    @property
    def progress(self) -> str | None:
        """The last report of the job with `Request.progress`, or the reason for a pause, or None.

        A share is a text such as "50%". Before the first report and after the end of the request,
        the value is None.
        """
        warn_if_blocking()
        return self._record().note

    async def aprogress(self) -> str | None:
        """Return `progress`, without blocking the loop of the coroutine."""
        return await in_thread(lambda: self.progress)

    def result(
        self, timeout_seconds: float | None = None, *, type: type[Value] | None = None
    ) -> Value:
        """Wait until the request has ended, and return its job's result (JSON or bytes).

        >>> app.request("invoice", {"order": 18}).result(timeout_seconds=60)
        {'url': 'https://example.org/18.pdf'}

        The call asks the broker every 1 to 250 milliseconds.

        :param timeout_seconds: maximum time to wait; None for no limit.
        :param type: return the result as this type, such as a dataclass (see "Types of bodies").
        :raises RequestFailedError: the request has failed, its job has skipped it, or its result
            does not fit the type. `details` has the outcome.
        :raises RequestCancelledError: the request was cancelled.
        :raises RequestTimeoutError: the request has not ended before the timeout.
        :raises UnreachableError: the broker cannot be reached. The caller may call `result` again.
        """
        warn_if_blocking()
        patience = _Patience(self.id, timeout_seconds)
        while (record := self._look()).state != OVER:
            time.sleep(patience.pause(record.state))
        return result_of(self._sender, record, type)

    async def aresult(
        self, timeout_seconds: float | None = None, *, type: type[Value] | None = None
    ) -> Value:
        """Wait like `result`, from a coroutine, without blocking its loop."""
        import asyncio  # slow to import, and most apps do not need it

        patience = _Patience(self.id, timeout_seconds)
        while (record := await asyncio.to_thread(self._look)).state != OVER:
            await asyncio.sleep(patience.pause(record.state))
        return result_of(self._sender, record, type)

    def cancel(self, reason: str = "") -> bool:
        """Cancel the request; return False if the request has already ended with another outcome.

        A waiting request never runs. The worker interrupts the job of a running request within a
        second. If the job ends earlier, its outcome counts. Of a request with steps, the open steps
        are cancelled, so that its job can undo the others; see "Workflows".

        :param reason: text for the error of the request, and for the message of `then`.
        """
        warn_if_blocking()
        if not isinstance(reason, str):
            raise _invalid("reason", "text", reason)
        error = printable(one_line(reason))
        mark = json.dumps({"cancel": error})
        while (record := self._record()).state != OVER:
            done = self._store.mark(self.id, mark)
            if not done and not record.take.owner:
                done = end_request(
                    self._sender, record.take, record.pool, record.reply, "cancelled", error or None
                )
            if done:  # otherwise a worker has taken the request, or the request has ended
                return True
        return record.outcome == "cancelled"

    acancel = twin(cancel)

    def resume(self, value: Any = None) -> None:
        """Let a paused request continue. `pause` in its job returns the value.

        :param value: JSON of at most 64 KiB.
        :raises RequestStateError: the request is not paused, was already resumed, is being
            cancelled, or its job now asks another question. `details` has the `note` of the
            request.
        """
        warn_if_blocking()
        what = "the value of resume"
        mark = _small_json(what, {"resume": plain_value(what, value)})
        record = self._record()
        if record.asks and not record.take.owner:  # without a job: the answer is the result
            value = json.loads(mark)["resume"]
            of = (record.take, record.pool, record.reply)
            if store_end(self._sender, *of, "done", value):
                return
        elif record.asks and self._store.mark(self.id, mark, record.mark):
            return
        record = self._record()
        expected = "paused"
        if record.is_cancelled:
            state = "being cancelled"
        elif record.asks:
            expected = "paused with the same question"
            state = f"asks {record.note!r} by now"
        else:
            state = "answered already" if record.state == PAUSED else STATES[record.state]
        raise RequestStateError(id=self.id, expected=expected, state=state, note=record.note)

    aresume = twin(resume)

    @property
    def _store(self) -> RequestStore:
        return self._sender.broker.requests

    def _record(self) -> RequestRecord:
        found = self._store.find(self.id, whole=False)
        if found is None:
            raise RequestNotFoundError(what="request", name=self.id, id=self.id)
        return found

    def _look(self) -> RequestRecord:
        record = self._record()
        while record.state != OVER and self._store.serve():
            record = self._record()
        return record

    def __repr__(self) -> str:
        return f"<Handle of request {self.id!r}>"


def result_of(sender: Sender, record: RequestRecord, type: type[Value] | None = None) -> Value:
    """Return the result of a request that is over; raise the errors of `Handle.result`."""
    reason = record.error or "it has no reason"
    outcome = record.outcome
    if outcome == "done" and record.result is not None:
        try:
            value: Value = loaded(type, opened(sender, record.pool, record.result))
            return value
        except ValueError as error:  # another program wrote the value
            reason = f"its result cannot be read: {error}"
    kind = RequestCancelledError if outcome == "cancelled" else RequestFailedError
    raise kind(id=record.id, pool=record.pool, outcome=outcome, reason=reason)


class _Patience:
    """The remaining time to wait for a result, with growing pauses."""

    def __init__(self, id: str, seconds: float | None) -> None:
        if seconds is not None and not (is_number(seconds) and seconds >= 0):
            raise _invalid("timeout_seconds", "a number of at least 0, or None", seconds)
        self._id = id
        self._seconds = seconds
        self._end = float("inf") if seconds is None else time.monotonic() + seconds
        self._next = FIRST_PAUSE_SECONDS

    def pause(self, state: int) -> float:
        """Return the seconds until the next check; raise RequestTimeoutError after the timeout."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise RequestTimeoutError(id=self._id, seconds=self._seconds, state=STATES[state])
        pause = self._next
        self._next = min(pause * 1.25, LAST_PAUSE_SECONDS)
        return min(pause, left)


class RequestCalls(Sender):
    """The request methods of an app."""

    def request(
        self,
        pool: str,
        body: Any,
        *,
        id: str | None = None,
        then: str | Stream | None = None,
        key: str | None = None,
        tag: Mapping[str, Any] | None = None,
        events: bool = False,
        priority: int = NORMAL,
        delay_seconds: float | None = None,
        at: Moment | None = None,
        keep_seconds: float = 3600.0,
        kind: str | None = None,
        deadline_seconds: float | None = None,
        paused: bool = False,
        connection: Any = None,
    ) -> Handle:
        """Store a request, which asks for a run of the pool's job on any worker.

        >>> app.request("invoice", {"order": 17}, id="17/invoice", then="order-17")
        <Handle of request '17/invoice'>

        :param id: 1 to 200 characters. The default is a random id. If a request with this id, pool
            and body exists, the call stores nothing and returns the handle of the existing request.
        :param then: a queue or stream that gets a message with the outcome: `request`, `pool`,
            `outcome`, `result` and `error`.
        :param key: the key of the message to `then`.
        :param tag: further keys for the body of the message to `then`.
        :param events: whether `then` also gets messages with the outcomes "started" and "paused".
        :param kind: as in `send`, like `body`, `priority`, `delay_seconds` and `at`.
        :param keep_seconds: time for which the result can be read after the request has ended.
        :param deadline_seconds: time after which a request that is not over is cancelled, however
            often it was retried.
        :param paused: no worker runs the request. `Handle.resume` ends it, and the value is its
            result.
        :param connection: as in `send`. The request exists only if the transaction commits.
        :raises RequestExistsError: a request with this id has another pool or body.
        :raises BodyLimitError: the body is larger than the setting `max_body_bytes`.
        :raises UnsupportedError: the broker is SQS or Kinesis.
        """
        warn_if_blocking(connection)
        terms = RequestTerms(
            pool, body, id, then, key, tag, events, priority, delay_seconds, at, keep_seconds, kind,
            deadline_seconds, paused,
        )  # fmt: skip
        return self._ask([terms], connection)[0]

    arequest = twin(request)

    def request_many(
        self, requests: Iterable[RequestTerms | Mapping[str, Any]], *, connection: Any = None
    ) -> list[Handle]:
        """Make many requests at once, all or none, and return their handles.

        :param requests: dicts with the parameters of `request`.
        :param connection: as in `request`.
        """
        warn_if_blocking(connection)
        return self._ask(requests, connection)

    arequest_many = twin(request_many)

    def _ask(
        self,
        requests: Iterable[RequestTerms | Mapping[str, Any]],
        connection: Any = None,
        parent: str | None = None,
        deadline: float = 0.0,
    ) -> list[Handle]:
        terms = [terms_of(each) for each in requests]
        plain = [_plain(each, self.type_of) for each in terms]
        new = [
            _new_request(request, clear, stored, self._stream_of)
            for request, clear, stored in zip(terms, plain, self.ready(plain), strict=True)
        ]
        if parent is not None:
            new = [replace(each, parent=parent, deadline=deadline or each.deadline) for each in new]
        if new:
            self.broker.requests.ask(new, connection)
        return [Handle(self, each.id) for each in new]

    def handle(self, id: str) -> Handle:
        """Return the handle of an existing request, which any process may have made."""
        return Handle(self, _checked_id(id))


def cancel_overdue(app: Sender) -> int:
    """Cancel the requests whose deadlines have passed; return their number."""
    late = app.broker.requests.records(late=True)
    for record in late:
        Handle(app, record.id).cancel("its deadline has passed")
    return len(late)


def terms_of(request: RequestTerms | Mapping[str, Any]) -> RequestTerms:
    if isinstance(request, RequestTerms):
        return request
    if not isinstance(request, Mapping):
        raise _invalid("a request", "a dict", request)
    try:
        return RequestTerms(**request)
    except TypeError as error:
        known = RequestTerms.__slots__
        raise names_error("the keys of a request", request, known) from error


def _plain(request: RequestTerms, type_of: TypeOf | None) -> Outgoing:
    pool = check_queue_name(request.pool)
    body, kind = body_and_kind(pool, request.body, request.kind, type_of, pool=True)
    data, headers = encoded(pool, body, None)
    if kind is not None:
        headers = with_header(headers, qdo_kind=kind)
    return Outgoing(pool, data, None, headers)


def _new_request(
    request: RequestTerms, plain: Outgoing, stored: Outgoing, stream_of: Callable[[str], str]
) -> NewRequest:
    keep = request.keep_seconds
    if not is_number(keep) or not 0 <= keep <= MAX_KEEP_SECONDS:
        raise _invalid("keep_seconds", f"a number from 0 to {MAX_KEEP_SECONDS}, 366 days", keep)
    options = build_send_options(request.delay_seconds, request.at)
    deadline = request.deadline_seconds
    if deadline is not None and not (is_number(deadline) and 0 < deadline <= MAX_KEEP_SECONDS):
        rule = f"a number above 0 and at most {MAX_KEEP_SECONDS}, 366 days"
        raise _invalid("deadline_seconds", rule, deadline)
    if type(request.paused) is not bool:
        raise _invalid("paused", "True or False", request.paused)
    return NewRequest(
        pool=request.pool,
        id=uuid.uuid4().hex if request.id is None else _checked_id(request.id),
        content=(stored.body, stored.headers),
        digest=_digest(plain),
        priority=int(priority_text(request.priority)),
        due=(options and options.due) or 0.0,
        reply=_reply(request, stream_of),
        keep_seconds=float(keep),
        deadline=-float(deadline or 0),
        paused=request.paused,
    )


def _digest(plain: Outgoing) -> bytes:
    about = json.dumps([plain.queue, plain.headers]).encode()
    return hashlib.sha256(b"%d %s%s" % (len(about), about, plain.body)).digest()


def _reply(request: RequestTerms, stream_of: Callable[[str], str]) -> str | None:
    tag = request.tag
    if request.then is None:
        if request.key is not None or tag is not None or request.events:
            raise UsageError(reason="key, tag and events require then, the queue that gets them")
        return None
    then = request.then
    if isinstance(then, Stream):
        then = then._queue_of(request.key or "")
    if request.key is None and stream_of(check_queue_name(then)) != then:
        raise keyless_error(then)  # without a key, the broker could not store the outcome
    if request.key is not None:
        check_key(request.key)
        check_request_text("key", request.key)  # checks text that the broker must store
    if type(request.events) is not bool:
        raise _invalid("events", "True or False", request.events)
    if tag is not None:
        if not isinstance(tag, dict) or RESULT_KEYS & tag.keys():
            names = ", ".join(sorted(RESULT_KEYS))
            raise _invalid("tag", f"a dict without the keys {names}", tag)
        _small_json("tag", tag)
    reply = {"then": then, "key": request.key, "tag": tag, "events": request.events}
    return json.dumps(reply)


def _small_json(what: str, value: Any) -> str:
    try:
        data = strict_json(value)
    except ValueError as error:
        raise UsageError(reason=f"{what} must be JSON, got {value!r:.80}: {error}") from error
    if len(data) > MAX_VALUE_BYTES:
        raise _invalid(what, f"JSON of at most {MAX_VALUE_BYTES} bytes", f"{len(data)} bytes")
    return data.decode()


def _checked_id(id: Any) -> str:
    if (
        not isinstance(id, str)
        or not 0 < len(id) <= MAX_ID_CHARACTERS
        or any(unicodedata.category(each) in ("Cc", "Cs") for each in id)
    ):
        rule = f"text of 1 to {MAX_ID_CHARACTERS} characters, without controls and surrogates"
        raise _invalid("the id of a request", rule, id)
    return id


def _invalid(what: str, rule: str, value: Any) -> UsageError:
    return UsageError(reason=f"{what} must be {rule}, got {value!r:.80}")
