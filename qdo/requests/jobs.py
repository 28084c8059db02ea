"""The request that the job of a pool gets, and the end of the request.

The job's process stores the result itself. Therefore a large result need not cross the pipe to the
worker. The process then reports the end to the worker (see `reporting`). Without a report,
middleware has skipped the job, and the worker ends the request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from qdo.bodies import MisfitError, loaded, plain_value
from qdo.brokers.base import Outgoing
from qdo.brokers.requests import IN_STEPS, OVER, PAUSED, RUNNING, Take
from qdo.callables import check_done, is_async
from qdo.encoding import decoded_headers
from qdo.errors import (
    RequestCancelledError,
    RequestFailedError,
    UnreachableError,
    UsageError,
)
from qdo.message import Body, Message, Value
from qdo.outcomes import DeadLetter, Retry
from qdo.requests.calls import RequestCalls, result_of
from qdo.requests.replies import end_request, reply_messages, store_end, until_answered
from qdo.requests.steps import Step, Steps, StepTerms, Suspended
from qdo.system.clock import clock
from qdo.system.processes import SIGN
from qdo.system.twins import in_own_thread, twin, warn_if_blocking
from qdo.text import describe

_log = logging.getLogger(__name__)

# Minimum time between two writes of `Request.progress`.
NOTE_SECONDS = 1.0
# Interval at which a paused request checks whether it may continue.
LOOK_SECONDS = 0.25
MOST_NOTE = 200

# Result of a pool job's call if the job's process has stored the end of the request.
ENDED = object()


class Request(Message[Body]):
    """A request for the job of its pool, with the parameters as `body`.

    Methods of a request wait for the broker: ``async def`` jobs await `aprogress` and `apause`.
    """

    __slots__ = ("_app", "_noted_at", "_steps", "_take")
    _app: RequestCalls
    _noted_at: float
    _steps: Steps | None
    _take: Take

    @classmethod
    def of(cls, app: RequestCalls, message: Message) -> Request:
        """Convert a message that a worker passes to a request."""
        request = message._copied(cls)
        take = Take.of_header(message.id, message.headers.get("qdo-take", ""))
        if take is None:
            raise UsageError(reason=f"{message.queue!r} is a pool, not a queue; use app.request")
        request._app = app
        request._noted_at = 0.0
        request._steps = None
        request._take = take
        return request

    def _with_body(self, body: Any) -> Request[Any]:
        self.body = body  # `of` has made this object for the job only
        return self

    @property
    def pool(self) -> str:
        """The name of the request's pool."""
        return self.queue

    @property
    def take(self) -> int:
        """Number of times that workers have taken this request.

        Sinks can reject late writes with smaller numbers.
        """
        return self._take.number

    def call(self, pool: str, body: Any = None, **terms: Unpack[StepTerms]) -> Any:
        """Run a step on any worker, and return its result; see "Workflows".

        >>> url = request.call("invoice", {"order": 17})["url"]

        If the result is not stored yet, this call ends the run of the job. The job runs again from
        its beginning when the step is over, and this call returns. Meanwhile, it takes no place.

        :param terms: parameters of `App.request`, such as `deadline_seconds` and `paused`.
        :raises RequestFailedError: the step has failed, or its job has skipped it.
        :raises RequestCancelledError: the step was cancelled, for example by its deadline.
        """
        warn_if_blocking()
        return self._results([{"pool": pool, "body": body, **terms}])[0]

    acall = twin(call)

    def gather(self, steps: Iterable[Step], *, return_exceptions: bool = False) -> list[Any]:
        """Run steps at the same time, and return their results once all are over.

        >>> request.gather([("charge", "card"), ("charge", "voucher")])
        ['paid 10', 'paid 5']

        :param steps: tuples ``(pool, body)``, or dicts with the parameters of `call`.
        :param return_exceptions: return the errors in the place of results.
        :raises RequestFailedError, RequestCancelledError: see `call`; the first of the errors.
        """
        warn_if_blocking()
        return self._results(steps, return_exceptions)

    agather = twin(gather)

    def _results(self, steps: Iterable[Step], return_exceptions: bool = False) -> list[Any]:
        if self._steps is None:
            self._steps = Steps(self._app, self.id)
        results: list[Any] = []
        for record in self._steps.ended(steps):
            try:
                results.append(result_of(self._app, record))
            except (RequestFailedError, RequestCancelledError) as error:
                if not return_exceptions:
                    raise
                results.append(error)
        return results

    def progress(self, progress: float | str) -> None:
        """Show a share from 0 to 1, or a text, in `qdo requests`. Stored at most once a second.

        >>> request.progress(0.5)
        """
        warn_if_blocking()
        if isinstance(progress, str):
            note = progress[:MOST_NOTE]
        elif type(progress) in (int, float) and 0 <= progress <= 1:
            note = f"{progress:.0%}"
        else:
            raise UsageError(
                reason=f"progress must be a number from 0 to 1 or text, got {progress!r:.60}"
            )
        if clock() - self._noted_at >= NOTE_SECONDS:
            # Set the time even after a failure, because an unreachable broker must not delay each
            # call.
            self._noted_at = clock()
            try:
                self._app.broker.requests.note(self._take, RUNNING, note)
            except UnreachableError as error:
                _log.debug("the progress of request %s is not shown: %s", self.id, error)

    aprogress = twin(progress)

    def pause(self, note: str = "", *, type: type[Value] | None = None) -> Value:
        """Wait for `Handle.resume` or ``qdo requests resume``, and return the value from this call.

        The request keeps its place in the pool. If the worker stops during the pause, the request
        begins again.

        :param type: return the value as this type; see "Types of bodies".
        :raises RequestCancelledError: the request was cancelled.
        :raises UsageError: the value does not fit the type.
        """
        warn_if_blocking()
        store = self._app.broker.requests
        self._tell("paused", PAUSED, note[:MOST_NOTE])
        while True:
            row = until_answered(lambda: store.find(self.id, whole=False), self._name)
            mark = (None if row is None else decoded_headers(row.mark)) or {}
            # If the request has another take, this take is over, and another worker may run the
            # request.
            if row is None or row.state == OVER or row.take != self._take or "cancel" in mark:
                reason = mark.get("cancel", "another worker has it, or it is over")
                raise RequestCancelledError(
                    id=self.id, pool=self.pool, outcome="cancelled", reason=reason
                )
            if "resume" in mark:
                self._note(RUNNING, None)
                return _answer(mark["resume"], type)
            if row.state == RUNNING:  # an earlier note took effect late
                self._note(PAUSED, note[:MOST_NOTE])
            # The end of the lease alone does not end the pause, because a lost request has a new
            # take.
            if SIGN.draining() or (self.stopping and SIGN.leased()):
                raise Retry(after=0, counts=False)
            time.sleep(LOOK_SECONDS)

    async def apause(self, note: str = "", *, type: type[Value] | None = None) -> Value:
        """Wait like `pause`, from a coroutine, without blocking its loop."""
        # A twin would lose the type variable.
        return await in_own_thread(lambda: self.pause(note, type=type))

    def _replies(self, outcome: str, result: Any = None) -> list[Outgoing]:
        reply = self.headers.get("qdo-reply")
        return reply_messages(self._app, self._take, self.pool, reply, outcome, result)

    @property
    def _name(self) -> str:
        return f"request {self.id} of pool {self.pool}"

    def _note(self, state: int, note: str | None, messages: Sequence[Outgoing] = ()) -> None:
        store = self._app.broker.requests
        until_answered(lambda: store.note(self._take, state, note, messages), self._name)

    def _tell(self, event: str, state: int, note: str | None) -> None:
        """Store a state with the message of an event. Omit the message if the broker refuses it."""
        try:
            self._note(state, note, self._replies(event))
        except Exception as refusal:  # noqa: BLE001 - the headers come from code of the app
            _log.warning("%s: its message %r is dropped: %s", self._name, event, describe(refusal))
            self._note(state, note)

    def _begin(self) -> None:
        if (decoded_headers(self.headers.get("qdo-reply")) or {}).get("events"):
            self._tell("started", RUNNING, None)

    def _suspend(self) -> None:
        """Let the request wait for its steps, without a place."""
        names = Counter(() if self._steps is None else self._steps.waiting)
        note = "in " + ", ".join(
            each if count == 1 else f"{count} × {each}" for each, count in names.items()
        )
        self._note(IN_STEPS, note[:MOST_NOTE])

    def _fail(self, error: RequestFailedError | RequestCancelledError) -> None:
        """End a request whose job has not handled the end of a step; raise other errors again."""
        id = error.details["id"]
        if self._steps is None or not self._steps.has(id):
            raise error
        if isinstance(error, RequestCancelledError):
            reason = f"its step {id} was cancelled: {error.details['reason']}"
            self._cancel(
                RequestCancelledError(id=self.id, pool="", outcome="cancelled", reason=reason)
            )
        else:  # another attempt would get the same result
            raise DeadLetter(f"its step {id} failed: {error.details['reason']}") from error

    def _cancel(self, error: RequestCancelledError) -> None:
        """End the request as cancelled."""
        if error.details["id"] != self.id:
            self._fail(error)
            return
        end_request(
            self._app,
            self._take,
            self.pool,
            self.headers.get("qdo-reply"),
            "cancelled",
            error.details["reason"],
            lambda call: until_answered(call, self._name),
        )

    def _finish(self, result: Any, function: Callable[..., Any]) -> None:
        """Store the result, which ends the request unless another worker has taken it."""
        reply = self.headers.get("qdo-reply")
        if self._steps is not None:
            self._steps.check_way()
        try:
            if result is not None:
                check_done(result, function, "job")
                result = plain_value("the result", result)
            ended = until_answered(
                lambda: store_end(self._app, self._take, self.pool, reply, "done", result),
                self._name,
            )
        except Exception as error:  # noqa: BLE001 - it would be refused after another run, too
            raise DeadLetter(f"its result cannot be stored: {describe(error)}") from None
        if not ended:
            _log.warning(
                "request %s of pool %s: the result of take %d is dropped, because the request is"
                " over or was taken again",
                self.id,
                self.pool,
                self.take,
            )


def _answer(value: Any, type: type[Value] | None) -> Value:
    try:
        answer: Value = loaded(type, value)
    except MisfitError as error:
        raise UsageError(reason=f"the value of resume is wrong: {error}") from error
    return answer


def reporting(call: Callable[[Message, Any], Any]) -> Callable[[Message, Any], Any]:
    """Return a call of a pool's job that returns `ENDED` unless middleware skips the job."""

    def run(message: Message, context: Any) -> Any:
        # The message carries the report past the middleware, because return values of middleware
        # are dropped. The report is a list, because middleware may pass on a copy of the message.
        message._ends = ends = list[bool]()
        call(message, context)
        return ENDED if ends else None

    return run


def answering(app: RequestCalls, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for workers that runs the job of a pool and stores the job's result."""
    if is_async(function):

        async def arun(message: Message, context: Any) -> None:
            request = Request.of(app, message)
            await asyncio.to_thread(request._begin)
            try:
                result = await function(request, context)
            except Suspended:
                await asyncio.to_thread(request._suspend)
            except RequestCancelledError as error:
                await asyncio.to_thread(request._cancel, error)
            except RequestFailedError as error:
                request._fail(error)
            else:
                await asyncio.to_thread(request._finish, result, function)
            message._report_end()

        return functools.wraps(function)(arun)

    def run(message: Message, context: Any) -> None:
        request = Request.of(app, message)
        request._begin()
        try:
            result = function(request, context)
        except Suspended:
            request._suspend()
        except RequestCancelledError as error:
            request._cancel(error)
        except RequestFailedError as error:
            request._fail(error)
        else:
            request._finish(result, function)
        message._report_end()

    return functools.wraps(function)(run)
