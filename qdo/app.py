"""An app, with its jobs, hooks and settings, and the messages that it sends."""

from __future__ import annotations

# Import this module now. Python cannot import it after the main thread has ended, but other threads
# may still use the app.
import concurrent.futures.thread  # noqa: F401
import contextlib
import fnmatch
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack, overload

from qdo.bodies import BodyType, kind_of
from qdo.brokers.base import Broker
from qdo.connections.services import (
    AppDocuments,
    kept_registration,
    live_connection,
    lock_connection,
)
from qdo.errors import UsageError
from qdo.fleet.limit_node import DeclaredLimit, LimitNode, checked_terms
from qdo.fleet.names import checked_name
from qdo.jobs.job import Checkpoint, Job, check_declaration
from qdo.jobs.kinds import KindJob
from qdo.jobs.middleware import (
    Around,
    AsyncMiddlewareFunction,
    ContextSource,
    FailureHook,
    Hooks,
    Middleware,
    MiddlewareFunction,
    Observer,
)
from qdo.jobs.options import ExecutorName, Order, RunOptions
from qdo.jobs.policy_tables import literal_characters
from qdo.jobs.retry import Policy
from qdo.operators import OperatorCalls
from qdo.requests.calls import RequestCalls
from qdo.system.twins import AsyncBlock, twin, warn_if_blocking
from qdo.text import pluralize

if TYPE_CHECKING:
    from qdo.fleet.documents import Documents, DocumentStore
    from qdo.fleet.locks import HeldLock, LockService, Section
    from qdo.fleet.permits import PermitAsk
    from qdo.message import Batch, Message
    from qdo.requests.jobs import Request
    from qdo.settings.given import GivenSettings
    from qdo.settings.live import SettingsInForce
    from qdo.settings.settings import Settings

# What decorators accept, and return unchanged. The run-time checks are in `qdo.callables`. A bound
# by text is not loaded: only type checkers need it.
_Job = TypeVar("_Job", bound="Callable[[Message, Any], object]")
_BatchJob = TypeVar("_BatchJob", bound="Callable[[Batch, Any], object]")
_PoolJob = TypeVar("_PoolJob", bound="Callable[[Request, Any], object]")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Context = TypeVar("_Context", bound=ContextSource)
_Middleware = TypeVar("_Middleware", bound=MiddlewareFunction)
_AsyncMiddleware = TypeVar("_AsyncMiddleware", bound=AsyncMiddlewareFunction)
_FailureHook = TypeVar("_FailureHook", bound=FailureHook)
_Observer = TypeVar("_Observer", bound=Observer)


class OutboxTable(Protocol):
    """An outbox, whose messages the workers of the app send (see `qdo.outbox.Outbox`)."""

    @property
    def table(self) -> Any: ...

    def relay(self, broker: Broker) -> int: ...

    def refused(self) -> Sequence[Any]: ...

    def counts(self, newest: int = 0) -> tuple[int, int, int]: ...

    def retry(self, ids: Collection[str]) -> None: ...

    def drop(self, ids: Collection[str]) -> None: ...

    def next_due(self) -> float | None: ...


class App(OperatorCalls, RequestCalls):
    """A named application, with its jobs and access to its messages.

    >>> qdo.App("mail", attempts=3)
    <App 'mail' with 0 jobs>

    :param name: name of the app's znode.
    :param job_context: a function that returns a context manager, or a generator function with one
        ``yield``. Each worker enters the context once. The value of the context is the second
        argument of jobs.
    :param job_failure: a function that the worker calls as ``job_failure(message, context, error)``
        after every failed attempt.
    :param settings: settings by name, such as ``broker="sqlite:/var/lib/qdo/messages.db"``. The
        TOML file, the environment and flags override them.
    :raises UnknownSettingError: a name is unknown. The error suggests the closest known name.
    :raises SettingsError: a name or value is invalid.

    Any number of threads and greenlets may use an app. After a fork the child opens its own
    connection to the broker. Methods raise UsageError for invalid values. Documents, locks, limits,
    sections, `register` and `live` need the coordinator. They raise CoordinatorUnreachableError if
    the coordinator does not respond, and SharedNameError if a name cannot be part of the path of a
    znode.
    """

    def __init__(
        self,
        name: str,
        *,
        job_context: ContextSource | None = None,
        job_failure: FailureHook | None = None,
        **settings: Unpack[GivenSettings],
    ) -> None:
        OperatorCalls.__init__(self, name, settings)
        self._jobs: list[Job] = []
        self.hooks = Hooks(name)
        """The registered hooks, for the engine and the testing kit."""
        self._documents = AppDocuments(name, lambda: self.settings)
        self.limits: dict[str, DeclaredLimit] = {}
        """The limits that `limit` has declared, by name."""
        self._locks = lock_connection(name, lambda: self.settings, self.limits)
        self._live = live_connection(name, lambda: self.settings, self.origin)
        self._registration = kept_registration(name, self._locks, lambda: self.settings)
        self.outboxes: list[OutboxTable] = []
        """Every outbox that the workers of this app relay; an outbox adds itself."""
        if job_context is not None:
            self.context(job_context)
        if job_failure is not None:
            self.failure(job_failure)

    # --- jobs ---

    @overload
    def job(
        self, queues: str = "*", *, pool: Literal[True], **options: Unpack[RunOptions]
    ) -> Callable[[_PoolJob], _PoolJob]: ...

    @overload
    def job(
        self,
        queues: str = "*",
        checkpoint: Checkpoint = "interval",
        *,
        batch: int,
        batch_wait_seconds: float = 0.0,
        order: Literal["queue", "none"] = "queue",
        **options: Unpack[RunOptions],
    ) -> Callable[[_BatchJob], _BatchJob]: ...

    @overload
    def job(
        self,
        queues: str = "*",
        checkpoint: Checkpoint = "interval",
        *,
        order: Order = "queue",
        **options: Unpack[RunOptions],
    ) -> Callable[[_Job], _Job]: ...

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
        limits: Collection[str] = (),
        per_queue_rate: str | None = None,
        pool: bool = False,
        body: Any = None,
        kind: str | None = None,
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function as the job for queues that match a glob.

        >>> @app.job("mail-*", policy=qdo.Policy(attempts=3))
        ... def deliver(message, context): ...

        :param queues: a glob. If several match, the glob with the most literal characters applies.
        :param executor: "greenlet", "thread" or "process". The default is the setting `executor`.
        :param timeout_seconds: time limit of one message (see "Executors and deadlines").
        :param memory_mib: resident memory above which the worker kills a job's process.
        :param recycle_after: number of messages after which the worker replaces a job's process.
        :param policy: the consequences of failed attempts. The setting `policies` overrides it.
            Missing values come from `attempts` and the backoff settings.
        :param order: which messages of a queue wait for each other: all ("queue"), messages with
            the same key ("key"), or none ("none"). "priority" runs the most urgent first.
        :param concurrency: maximum messages of one queue in flight, with `order` "key" or "none".
        :param batch: call the function with a `qdo.Batch` of at most this many messages.
        :param batch_wait_seconds: time for which an incomplete batch waits for more messages.
        :param limits: names of limits. Each call of the job needs a permit from every limit.
        :param per_queue_rate: maximum rate at which each queue may start messages, such as "5/s".
        :param pool: whether the job runs requests of the pools with these names.
        :param body: the type of `message.body`, by default that of ``message: qdo.Message[TYPE]``.
        :param kind: the kind of its messages, by default the type's name (see "Types of bodies").
        """
        check_declaration(queues, checkpoint, policy)
        options: dict[str, Any] = {"executor": executor, "timeout_seconds": timeout_seconds}
        options |= {"memory_mib": memory_mib, "recycle_after": recycle_after, "policy": policy}
        options |= {"order": order, "concurrency": concurrency, "batch": batch, "limits": limits}
        options |= {"batch_wait_seconds": batch_wait_seconds, "per_queue_rate": per_queue_rate}
        options |= {"queues": queues, "checkpoint": checkpoint, "pool": pool}
        return lambda function: self._register(function, options, body, kind)

    def _register(
        self, function: _Function, options: dict[str, Any], body: Any, kind: str | None
    ) -> _Function:
        job = Job.checked(function, **options)
        for middleware in self.hooks.middleware:
            middleware.check_job(job.function)
        earlier = next((each for each in self._jobs if each.queues == job.queues), None)
        job = job.joined(KindJob.of(function, body, kind), earlier)
        if job.kinds is not None and not job.kinds.is_plain:
            self.type_of = self._type_of
        if job.pool:
            from qdo.requests.jobs import answering

            job = replace(job, function=answering(self, job.function))
        self._jobs = [*(each for each in self._jobs if each is not earlier), job]
        self._jobs.sort(key=lambda each: literal_characters(each.queues), reverse=True)
        return function

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Every registered job, the most specific glob first."""
        return tuple(self._jobs)

    def job_for(self, queue: str) -> Job | None:
        """Return the job for a queue, or None."""
        for job in self._jobs:
            if fnmatch.fnmatchcase(queue, job.queues):
                return job
        return None

    def _type_of(
        self, queue: str, kind: str | None, body: type, pool: bool
    ) -> tuple[BodyType | None, str | None]:
        job = self.job_for(queue)
        if job is None or job.kinds is None or job.pool != pool:
            return None, kind_of(body) if kind is None else kind
        if kind is None:
            kind = job.kinds.kind_of(body)
        return job.kinds.type_of(queue, kind), kind

    # --- the fleet ---

    def register(self) -> None:
        """List this process in `qdo workers --all` until `close`, as workers are listed.

        Web servers and other senders may call this method. The method opens a connection to the
        coordinator, which locks also use. A forked child must register itself.
        """
        warn_if_blocking()
        self._registration.get()

    aregister = twin(register)

    @property
    def live(self) -> Settings:
        """The current settings of this process, with the live settings of the app.

        Outside workers, the first use connects to the coordinator.
        """
        return self._live.get().now

    def documents(self, name: str) -> Documents:
        """Return a set of documents. All processes of the app share these JSON values.

        >>> plans = app.documents("plans")
        >>> version = plans.put("acme", {"quota": 100})
        >>> plans["acme"]["quota"]
        100
        """
        documents = self._documents[name]
        for each in self._documents.middleware():
            if each not in self.hooks.own_middleware:
                self.hooks.own_middleware.append(each)
        return documents

    def lock(
        self,
        name: str,
        *,
        shared: bool = False,
        reason: str = "",
        timeout_seconds: float | None = None,
    ) -> AsyncBlock[HeldLock]:
        """Hold a lock of the app during a ``with`` block. One process at a time holds a lock.

        A coroutine writes ``async with``.

        >>> with app.lock("report", reason="monthly report") as lock:
        ...     lock.valid
        True

        :param shared: hold the lock together with other shared holders, but never with an exclusive
            holder.
        :param reason: text of up to 200 characters that `qdo locks` shows.
        :param timeout_seconds: maximum time to wait for the lock; None to wait forever.
        :raises LockTimeoutError: the lock was not free before the timeout.
        """
        from qdo.fleet.locks import held_lock

        lock = held_lock(self._locks.get, name, shared, reason, timeout_seconds)
        return AsyncBlock("app.lock", lock)

    def limit(
        self,
        *names: str,
        max: int | None = None,
        rate: str | None = None,
        timeout_seconds: float | None = None,
    ) -> PermitAsk:
        """Hold a permit of each limit during a ``with`` block, or `try_acquire` the permits.

        A coroutine writes ``async with``, or awaits `atry_acquire`.

        >>> with app.limit("crm", timeout_seconds=5):
        ...     print("call the CRM")
        call the CRM

        :param max: declare the limit, with this number of permits in the fleet. Workers create the
            limit when they start. A value that an operator has set has priority.
        :param rate: declare the limit, with this number of starts in the fleet, such as "20/s".
        :param timeout_seconds: maximum time for which a ``with`` block waits for the permits; None
            to wait forever.
        :raises LimitTimeoutError: not all permits were free before the timeout.
        :raises LimitNotFoundError: the limit does not exist.
        """
        from qdo.fleet.permits import PermitAsk

        if max is not None or rate is not None:
            self._declare_limit(names, checked_terms(max, rate))
        return PermitAsk(lambda: self._locks.get().permits, names, timeout_seconds)

    def _declare_limit(self, names: tuple[str, ...], terms: LimitNode) -> None:
        if len(names) != 1:
            reason = f"app.limit must have one name if it has max or rate, got {names!r}"
            raise UsageError(reason=f"{reason}; declare each limit by itself")
        name = checked_name("limit", names[0])
        if self.limits.setdefault(name, DeclaredLimit(terms)).node != terms:
            reason = f"app {self.name!r} already declares limit {name!r} with another max or rate"
            raise UsageError(reason=f"{reason}; declare it once", name=name)

    def exclusive(
        self, *queues: str, reason: str = "", timeout_seconds: float = 60.0
    ) -> AsyncBlock[Section]:
        """Pause queues in the whole fleet during a ``with`` block.

        A coroutine writes ``async with``.

        The block begins once no message of these queues is in flight anywhere. The pause ends with
        the block or with this process.

        >>> with app.exclusive("mail-*", reason="migration") as section:
        ...     section.valid
        True

        :param queues: globs of the queues' names.
        :param reason: text that `qdo pause --list` and `qdo queues` show.
        :param timeout_seconds: maximum time to wait for the messages in flight, and for sections
            that pause the same queues.
        :raises PauseNotObeyedError: the queues did not pause before the timeout. They continue.
        """
        from qdo.fleet.locks import held_section

        section = held_section(self._locks.get, queues, reason, timeout_seconds)
        return AsyncBlock("app.exclusive", section)

    @contextlib.contextmanager
    def override_coordinator(
        self,
        documents: DocumentStore | None = None,
        locks: LockService | None = None,
        live: SettingsInForce | None = None,
    ) -> Iterator[None]:
        """Use other stores of documents, locks or live settings until the block ends.

        For `qdo.testing`, and for workers, which receive settings over their own connections.
        """
        with contextlib.ExitStack() as stack:
            if documents is not None:
                stack.enter_context(self._documents.connection.override(documents))
            if locks is not None:
                stack.enter_context(self._locks.override(locks))
            if live is not None:
                stack.enter_context(self._live.override(live))
            yield

    def close(self) -> None:
        """Close the connections of the app. The next use of the app opens them again."""
        super().close()
        self._registration.close()
        self._documents.connection.close()
        self._locks.close()
        self._live.close()

    # --- hooks ---

    def context(self, factory: _Context) -> _Context:
        """Register the decorated function as the app's `job_context`.

        An async generator, or an async context manager, is for ``async def`` jobs: the worker
        enters and leaves it on their loop.
        """
        self.hooks.add_context(factory)
        return factory

    @overload
    def middleware(self, function: _Middleware) -> _Middleware: ...

    @overload
    def middleware(
        self, *, jobs: Literal["async"]
    ) -> Callable[[_AsyncMiddleware], _AsyncMiddleware]: ...

    @overload
    def middleware(
        self, *, jobs: Literal["all", "sync"] = "all"
    ) -> Callable[[_Middleware], _Middleware]: ...

    def middleware(
        self, function: _Function | None = None, *, jobs: Around = "all"
    ) -> _Function | Callable[[_Function], _Function]:
        """Register the decorated function as a middleware, which runs around the call of every job.

        The worker calls ``function(call_next, message, context)``. The function runs the next
        middleware, or the job, with ``call_next(message, context)``. The first registered
        middleware is outermost. If a middleware does not call ``call_next``, the message is done
        and its job does not run. If a middleware raises an exception, the attempt ends with this
        exception. A middleware runs in the same thread, process or asyncio loop as the job.

        :param jobs: "sync" for ``def`` jobs only, "async" for ``async def`` jobs only. The
            middleware must be of the same kind.
        """

        def register(function: _Function) -> _Function:
            middleware = Middleware(function, jobs)
            for job in self._jobs:
                middleware.check_job(job.function)
            self.hooks.middleware.append(middleware)
            return function

        return register if function is None else register(function)

    def failure(self, hook: _FailureHook) -> _FailureHook:
        """Register the decorated function as the app's `job_failure`."""
        self.hooks.add_failure(hook)
        return hook

    def observer(self, hook: _Observer) -> _Observer:
        """Register the decorated function. The worker calls it with a `qdo.Event` for each attempt.

        An app may have several observers. An observer delays its queue while it runs, so it should
        be fast. The worker logs an exception from an observer, and continues.
        """
        self.hooks.add_observer(hook)
        return hook

    def __repr__(self) -> str:
        return f"<App {self.name!r} with {pluralize(len(self._jobs), 'job')}>"
