"""An app: its jobs, its hooks, its settings, and sending messages."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from qdo.callbacks import check_call, check_hook, check_job, check_plain, described
from qdo.errors import UsageError
from qdo.events import Event
from qdo.message import Message
from qdo.middleware import Around, Middleware, compose
from qdo.ordering import CONCURRENCY, Order, check_batch, check_order
from qdo.placement import ExecutorName, check_placement
from qdo.policies import literal_characters
from qdo.policy import Policy
from qdo.sender import Sender

if TYPE_CHECKING:
    from qdo.outbox import Outbox

JobFunction = Callable[[Message, Any], Any]
ContextFactory = Callable[[], AbstractContextManager[Any]]
FailureHook = Callable[[Message, Any, BaseException], Any]
Observer = Callable[[Event], Any]
Checkpoint = Literal["interval", "message"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Job:
    """A callback for messages.

    :ivar function: called as ``function(message, context)``; what it returns is ignored.
    :ivar queues: glob of the queues it is for.
    :ivar checkpoint: "interval" records progress every `checkpoint_seconds`; "message" also
        after every message, before the next one of the queue starts.
    :ivar executor: where it runs, None for the setting `executor`; ``async def`` jobs run on
        an asyncio loop.
    :ivar timeout_seconds: how long one message may take, None for any time.
    :ivar memory_mib: resident memory at which its process is killed (executor "process").
    :ivar recycle_after: messages after which its process is replaced (executor "process").
    :ivar policy: what follows from failed attempts, None for what the settings say.
    :ivar order: "queue": one message of a queue at a time; "key": one message of each key;
        "none": any.
    :ivar concurrency: messages of one queue in hand at once, None for what suits the order.
    :ivar batch: it is called with a `qdo.Batch` of so many messages at most, None: with one
        message.
    :ivar batch_wait_seconds: how long a batch that is not full waits for more.
    """

    function: JobFunction
    queues: str = "*"
    checkpoint: Checkpoint = "interval"
    executor: ExecutorName | None = None
    timeout_seconds: float | None = None
    memory_mib: int | None = None
    recycle_after: int | None = None
    policy: Policy | None = None
    order: Order = "queue"
    concurrency: int | None = None
    batch: int | None = None
    batch_wait_seconds: float = 0.0

    @property
    def lanes(self) -> int:
        """How many messages of one queue may be in hand at once."""
        if self.order == "queue":
            return 1
        return CONCURRENCY if self.concurrency is None else self.concurrency

    @property
    def name(self) -> str:
        """The function as MODULE:FUNCTION, for logs."""
        return described(self.function)


class App(Sender):
    """A named application: its jobs and how to reach its messages.

    :param name: name of its znode.
    :param job_context: makes the context manager whose value jobs get as their second
        argument; entered once per worker. A generator function with one ``yield`` will do.
    :param job_failure: called as ``job_failure(message, context, error)`` after every failed
        attempt.
    :param settings: settings by name, such as ``broker="sqlite:/var/lib/qdo/messages.db"``;
        the TOML file, the environment and flags win over them.
    :raises UnknownSettingError: with the nearest known name.
    :raises SettingsError: a name or value will not do.

    An app may be used from any number of threads and greenlets. After a fork the child opens
    the broker anew.
    """

    def __init__(
        self,
        name: str,
        *,
        job_context: Callable[[], Any] | None = None,
        job_failure: FailureHook | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(name, settings)
        self._jobs: list[Job] = []
        self._job_context: ContextFactory = _empty_context
        self._job_failure: FailureHook = _ignore_failure
        self._observers: list[Observer] = []
        self._middleware: list[Middleware] = []
        self._outboxes: list[Outbox] = []
        if job_context is not None:
            self.context(job_context)
        if job_failure is not None:
            self.failure(job_failure)

    # --- jobs and hooks ---

    def job(
        self,
        queues: str = "*",
        checkpoint: Checkpoint = "interval",
        *,
        executor: ExecutorName | None = None,
        timeout_seconds: float | None = None,
        memory_mib: int | None = None,
        recycle_after: int | None = None,
        policy: Policy | None = None,
        order: Order = "queue",
        concurrency: int | None = None,
        batch: int | None = None,
        batch_wait_seconds: float = 0.0,
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function as the job for queues that match a glob.

        Where several globs match, the one with the most literal characters wins, so a job for
        ``mail-*`` takes precedence over a job for ``*``.

        :param executor: "greenlet", "thread" or "process"; the setting `executor` otherwise.
            An ``async def`` function runs on the worker's asyncio loop.
        :param timeout_seconds: how long one message may take; what happens then depends on
            the executor, see the page "Executors and deadlines" of the documentation.
        :param memory_mib: resident memory at which a job's process is killed.
        :param recycle_after: messages after which a job's process is replaced.
        :param policy: what follows from failed attempts, whole as it is given; the setting
            `policies` wins over it, and without it `attempts` and the back-off settings hold.
        :param order: which messages of a queue wait for each other: all of them ("queue"),
            those of the same key ("key"), or none ("none").
        :param concurrency: how many messages of one queue may be in hand at once, 10 by default;
            with `order` "key" or "none".
        :param batch: call it with up to so many messages of a queue at once, a `qdo.Batch`.
        :param batch_wait_seconds: how long to wait for more where there are fewer.
        :raises UsageError: it cannot be called with (message, context), is a generator, the
            glob has its job already, or options contradict each other.
        """
        if callable(queues):
            raise UsageError(reason="write @app.job() with parentheses")
        if not isinstance(queues, str):
            raise UsageError(
                reason=f"queues={queues!r} is no text: give one glob, and register the job once "
                "for each of several"
            )
        if checkpoint not in ("interval", "message"):
            raise UsageError(
                reason=f"checkpoint={checkpoint!r} is neither 'interval' nor 'message'"
            )
        if policy is not None and not isinstance(policy, Policy):
            raise UsageError(reason=f"policy={policy!r} is no policy: write qdo.Policy(...)")

        def register(function: _Function) -> _Function:
            check_job(function, "message" if batch is None else "batch")
            name = described(function)
            check_order(name, order, concurrency, checkpoint, policy)
            check_batch(name, batch, batch_wait_seconds, order, executor)
            check_placement(function, executor, timeout_seconds, memory_mib, recycle_after)
            for middleware in self._middleware:
                middleware.check_job(function)
            placed: dict[str, Any] = {"executor": executor, "timeout_seconds": timeout_seconds}
            placed |= {"memory_mib": memory_mib, "recycle_after": recycle_after}
            placed |= {"policy": policy, "order": order, "concurrency": concurrency}
            placed |= {"batch": batch, "batch_wait_seconds": batch_wait_seconds}
            if any(job.queues == queues for job in self._jobs):
                raise UsageError(reason=f"app {self.name!r} has a job for {queues!r} already")
            self._jobs.append(Job(function, queues, checkpoint, **placed))
            self._jobs.sort(key=_literal_characters, reverse=True)
            return function

        return register

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Every registered job, the most particular glob first."""
        return tuple(self._jobs)

    def job_for(self, queue: str) -> Job | None:
        """Return the job for a queue, None when there is none."""
        for job in self._jobs:
            if fnmatch.fnmatchcase(queue, job.queues):
                return job
        return None

    def context(self, factory: _Function) -> _Function:
        """Register the decorated function as the app's `job_context`.

        :raises UsageError: it cannot be called without arguments, is ``async``, or the app has
            one already.
        """
        if self._job_context is not _empty_context:
            raise self._has_already("job_context", "make one that yields what both of them do")
        self.replace_context(factory)
        return factory

    def replace_context(self, factory: Callable[[], Any]) -> None:
        """Take a function as `job_context`, in place of that of the app where it has one."""
        check_call(factory, (), "job_context")
        check_plain(factory, "job_context")
        if inspect.isgeneratorfunction(factory):
            self._job_context = contextlib.contextmanager(factory)
        else:
            self._job_context = _checked(factory)

    @overload
    def middleware(self, function: _Function) -> _Function: ...

    @overload
    def middleware(self, *, jobs: Around = "all") -> Callable[[_Function], _Function]: ...

    def middleware(
        self, function: _Function | None = None, *, jobs: Around = "all"
    ) -> _Function | Callable[[_Function], _Function]:
        """Register the decorated function: it runs around the call of every job.

        It is called as ``function(call_next, message, context)`` and runs the job, or the next
        middleware, with ``call_next(message, context)``; the one registered first is outermost.
        If it does not, the message is done without its job; what it raises is how the attempt
        ends. It runs where the job runs: in its thread, in its process, on the asyncio loop.

        :param jobs: "sync" for jobs of ``def`` only, "async" for those of ``async def`` only,
            with a middleware of the same kind.
        :raises UsageError: it cannot be called so, or it is ``async def`` and a job is not, or
            the other way round.
        """

        def register(function: _Function) -> _Function:
            middleware = Middleware(function, jobs)
            for job in self._jobs:
                middleware.check_job(job.function)
            self._middleware.append(middleware)
            return function

        return register if function is None else register(function)

    def composed(self, job: Job) -> Job:
        """Return a job whose function is the whole call, middleware included.

        Without middleware it is the job itself.
        """
        function = compose(job.function, self._middleware)
        return job if function is job.function else replace(job, function=function)

    def failure(self, hook: _Function) -> _Function:
        """Register the decorated function as the app's `job_failure`.

        :raises UsageError: it cannot be called with (message, context, error), is ``async``, or
            the app has one already.
        """
        if self._job_failure is not _ignore_failure:
            raise self._has_already("job_failure", "have one call the other")
        self.replace_failure(hook)
        return hook

    def replace_failure(self, hook: FailureHook) -> None:
        """Take a function as `job_failure`, in place of that of the app where it has one."""
        check_hook(hook, ("message", "context", "error"), "job_failure")
        self._job_failure = hook

    def _has_already(self, what: str, remedy: str) -> UsageError:
        return UsageError(reason=f"app {self.name!r} has a {what} already: {remedy}")

    def observer(self, hook: _Function) -> _Function:
        """Register the decorated function: it is called with a `qdo.Event` for each attempt.

        There may be several. It runs in the turn of the queue and should be quick; what it raises
        is logged and changes nothing.

        :raises UsageError: it cannot be called with (event), or is ``async``.
        """
        check_hook(hook, ("event",), "observer")
        self._observers.append(hook)
        return hook

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Every registered observer, in the order of registration."""
        return tuple(self._observers)

    def relay(self, outbox: Outbox) -> None:
        """Have the workers of this app send what is in an outbox; making one calls this."""
        self._outboxes.append(outbox)

    @property
    def outboxes(self) -> tuple[Outbox, ...]:
        """Every outbox that the workers of this app relay."""
        return tuple(self._outboxes)

    @property
    def job_context(self) -> ContextFactory:
        """What makes the context manager of a worker; by default it yields an empty dict."""
        return self._job_context

    @property
    def job_failure(self) -> FailureHook:
        """What to call after a failed attempt; by default it does nothing."""
        return self._job_failure

    def __repr__(self) -> str:
        return f"<App {self.name!r} with {len(self._jobs)} jobs>"


@contextlib.contextmanager
def _empty_context() -> Iterator[dict[str, Any]]:
    yield {}


def _checked(factory: Callable[..., Any]) -> ContextFactory:
    """Return a factory whose product is looked at before a worker enters it."""

    def make() -> AbstractContextManager[Any]:
        manager: AbstractContextManager[Any] = factory()
        if not hasattr(type(manager), "__enter__") or not hasattr(type(manager), "__exit__"):
            raise UsageError(
                reason=f"job_context {described(factory)} returned an object of type "
                f"{type(manager).__name__}, which is no context manager: write 'yield' for "
                "'return', and what comes after it is the tear-down"
            )
        return manager

    return make


def _ignore_failure(message: Message, context: Any, error: BaseException) -> None:
    """Do nothing: the worker itself logs every failed attempt."""


def _literal_characters(job: Job) -> int:
    return literal_characters(job.queues)
