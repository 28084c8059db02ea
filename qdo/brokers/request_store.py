"""The interface of every store of requests.

Each method is one transaction. A *take* names a request, the worker that took it and how often it
was taken: a number that only grows. Whatever an older take reports changes nothing. The message
that tells of an outcome is stored by the transaction that records the outcome.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any

from qdo.brokers.outgoing import Outgoing
from qdo.brokers.requests import Content, NewRequest, PoolCounts, RequestRecord, Take, Taken

EXPIRED_AT_ONCE = 1000
# A take is complete once its bodies have this size.
TAKEN_BYTES = 32 * 1024 * 1024


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
        :raises UnsupportedError: `connection` is given, and the broker is not a database of apps.
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
        """Return a request, None without one; `whole` with its body, always with its result."""

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

        :param failed: ids: delete those of them that have failed, and nothing else. Others stay.
        """

    @abc.abstractmethod
    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` soon after a request may be taken or was marked; return a way to stop.

        A thread or greenlet of the broker calls it. It may be called without reason. A process
        that dies may leave out a call: look once a second as well.
        """
