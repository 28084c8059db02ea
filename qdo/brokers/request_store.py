"""The interface of every store of requests.

Each method is one transaction. A *take* names a request, the worker that took it, and the number of
takes so far, which only increases. Reports from an older take have no effect. One transaction
records an outcome and stores the message about the outcome.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any

from qdo.brokers.outgoing import Outgoing
from qdo.brokers.requests import (
    OVER,
    STATES,
    Content,
    NewRequest,
    PoolCounts,
    RequestRecord,
    Take,
    Taken,
)
from qdo.errors import RequestNotFoundError, RequestStateError

# Maximum number of steps of a request. Each run of its job reads all of them.
MOST_STEPS = 10_000
EXPIRED_AT_ONCE = 1000
# The total size of bodies at which a take is complete.
TAKEN_BYTES = 32 * 1024 * 1024


class RequestStore(abc.ABC):
    """The requests of one app. Safe to use from several threads.

    Each method raises UnreachableError if the broker does not respond; see `Broker.send`. The
    broker may still have made the change. Callers can repeat all methods except `ask` and `take`.
    """

    # The testing kit runs jobs while the code of a test waits for a result; it returns whether any
    # ran. A real store returns False.
    serve: Callable[[], bool] = staticmethod(bool)

    @abc.abstractmethod
    def ask(self, requests: Sequence[NewRequest], connection: Any = None) -> list[bool]:
        """Store all requests or none of them; return for each whether it was new.

        A new request may reuse the id of a request, even a failed one, that is over and past
        `until`.

        :param connection: a connection of the app. Store the requests if, and only if, its
            transaction commits; see `Broker.send_within`.
        :raises RequestExistsError: a request with this id has another pool or body.
        :raises UnsupportedError: the broker cannot join the transaction of `connection`.
        """

    @abc.abstractmethod
    def take(
        self, owner: str, pool: str, places: int, running: Collection[str], oldest: int = 0
    ) -> Taken:
        """Take due requests of a pool: at most `places`, by priority and then by age.

        If the response to an earlier take was lost, the worker owns requests that it does not run.
        The method takes such requests again, even more than `places`. With `places` 0, the method
        returns only such requests and the marks. When the bodies have `TAKEN_BYTES`, the next take
        returns further requests.

        :param running: the ids of the pool's requests that the worker runs.
        :param oldest: the number of places for the oldest requests, regardless of priority.
        """

    @abc.abstractmethod
    def note(
        self, take: Take, state: int, note: str | None, messages: Sequence[Outgoing] = ()
    ) -> bool:
        """Set the state and note of a running or paused request; send messages.

        The state is `RUNNING` or `PAUSED`. Each pause makes a unique mark. Only the mark ``cancel``
        outlives the pause. `IN_STEPS` pauses the request without an owner until its steps are over;
        if they already are, the request waits again. Its attempts count from 1 again.

        :return: whether the take is still valid; a call with an invalid take has no effect.
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
        """Record the outcome of a request, and send messages about the outcome.

        To end a waiting request, pass the take in its record. The outcome "done" deletes the body.
        The end of the last open step of a suspended request makes that request wait again.

        :param failed: the number of attempts that count as failed; None keeps the number.
        :return: whether this take has ended the request, in this call or an earlier one.
        """

    @abc.abstractmethod
    def put_back(self, take: Take, failed: int, seconds: float, error: str | None) -> bool:
        """Make a running or paused request wait again; return whether the take was still valid.

        :param seconds: the delay before the next take, by the clock of the store.
        :param error: the error of the attempt; None keeps the error of an earlier attempt.
        """

    @abc.abstractmethod
    def retry(self, id: str, forget: Collection[str] = ()) -> bool:
        """Retry a request that is over and still has its body; return whether this was possible.

        Attempts of the request count from 1 again. The number of takes increases, so a repeated
        report of the earlier end has no effect. A step itself cannot be retried.

        :param forget: steps to delete, so that its job asks for them again; see `steps_to_forget`.
        """

    @abc.abstractmethod
    def mark(self, id: str, mark: str, asked: str | None = None) -> bool:
        """Cancel a running or paused request, or answer a paused request; return if it worked.

        The cancellation of a request with steps makes the present time its deadline, so that its
        job can compensate. Requests without an owner and without steps are not changed.

        :param asked: the mark of the question to answer, so that the answer applies to no other
            question.
        """

    @abc.abstractmethod
    def owners(self) -> list[str]:
        """Return the names of the workers that own requests."""

    @abc.abstractmethod
    def give_back(self, owner: str) -> int:
        """Let all requests of a lost worker wait again, each with one more failed attempt.

        The error of the failed attempt names the worker.

        :param owner: the name of the worker, which no other worker ever uses. This method does not
            check the maximum number of attempts.
        :return: the number of requests.
        """

    @abc.abstractmethod
    def find(self, id: str, *, whole: bool = True) -> RequestRecord | None:
        """Return a request with its result, and its body if `whole`; None if it does not exist."""

    @abc.abstractmethod
    def records(
        self,
        pool: str | None = None,
        states: Collection[int] = (),
        limit: int = 1000,
        *,
        newest: bool = False,
        outcome: str | None = None,
        of: str | None = None,
        late: bool = False,
    ) -> list[RequestRecord]:
        """Return requests without their bodies and results, oldest first.

        :param states: return only requests in these states; empty: return all requests.
        :param newest: return the newest requests first.
        :param outcome: one of `OUTCOMES`; return only requests with this outcome.
        :param of: the id of a request; return only this request, and all its steps with results.
        :param late: return only requests that the leader must cancel: their deadline has passed, or
            that of a request whose step they already were. A request with steps is not among them.
        """

    @abc.abstractmethod
    def due(self, owner: str = "", running: Collection[str] = ()) -> dict[str, float]:
        """Return the pools in which a worker may find requests, each with `Taken.next_due`.

        The result has pools with waiting requests, and pools with requests that the worker owns but
        does not run.

        :param running: the ids of the requests that the worker runs.
        """

    @abc.abstractmethod
    def counts(self) -> dict[str, PoolCounts]:
        """Return the counts of each pool that has unfinished or failed requests.

        A failed step counts as part of the request that asked for it.
        """

    @abc.abstractmethod
    def expire(self, failed: Sequence[str] = ()) -> int:
        """Delete at most 1,000 requests that are over and past `until`; return their number.

        Their steps are deleted with them.

        :param failed: the ids of failed requests; delete only these requests.
        """

    @abc.abstractmethod
    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` soon after a request becomes due or marked; return a function to stop this.

        A thread or greenlet of the broker calls `wake`, sometimes without such a request. If a
        sender dies, a call may be missing, so callers must also look once a second.
        """


def steps_to_forget(store: RequestStore, id: str, since: str | None = None) -> list[str]:
    """Return the ids of the steps for which a retried request must ask again.

    :param since: one of its steps. The request repeats this step and all later ones. By default, it
        repeats the steps that are not done, unless its job went on after their ends: then it has
        handled them, as one that undoes others.
    :raises RequestNotFoundError: the request has no such step.
    :raises RequestStateError: a step is not over. A second run would run beside the first.
    """
    steps = [each for each in store.records(of=id, limit=MOST_STEPS + 1) if each.id != id]
    for each in steps:
        if each.state != OVER:
            raise RequestStateError(id=each.id, expected="over", state=STATES[each.state])
    if since is not None:
        names = [each.id for each in steps]
        if since not in names:
            raise RequestNotFoundError(what=f"step of request {id!r}", name=since, id=since)
        chosen = names[names.index(since) :]
        return [*chosen, *(each for name in chosen for each in _below(store, name))]
    # A job asks again only when all earlier steps are over, so the last ones have one time.
    last = [each for each in steps if each.asked == steps[-1].asked and each.outcome != "done"]
    found = [each.id for each in last]
    return [*found, *(each for name in found for each in steps_to_forget(store, name))]


def _below(store: RequestStore, id: str) -> list[str]:
    """Return the ids of the steps of a step, and of theirs."""
    found = [each.id for each in store.records(of=id, limit=MOST_STEPS + 1) if each.id != id]
    return [*found, *(each for name in found for each in _below(store, name))]
