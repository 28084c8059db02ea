"""An app: its jobs, its hooks, its settings, and sending messages."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from qdo.callbacks import check_call, check_job, described
from qdo.errors import SettingsError, UsageError
from qdo.events import Event
from qdo.message import Message
from qdo.placement import ExecutorName, check_placement
from qdo.policies import literal_characters
from qdo.policy import Policy
from qdo.sending import AnyMessage, Moment, check_terms, outgoing, outgoing_of
from qdo.settings import Settings, check_names, load

if TYPE_CHECKING:
    from qdo.brokers.base import Broker, Outgoing

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
    """

    function: JobFunction
    queues: str = "*"
    checkpoint: Checkpoint = "interval"
    executor: ExecutorName | None = None
    timeout_seconds: float | None = None
    memory_mib: int | None = None
    recycle_after: int | None = None
    policy: Policy | None = None

    @property
    def name(self) -> str:
        """The function as MODULE:FUNCTION, for logs."""
        return described(self.function)


class App:
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
        check_names(settings, f"App({name!r})")
        self.name = name
        self.given: Mapping[str, Any] = {**settings, "app": name}
        """Settings given in code."""
        if not name:
            raise SettingsError(name="app", reason="it is empty")
        Settings(**self.given)
        self._jobs: list[Job] = []
        self._job_context: ContextFactory = _empty_context
        self._job_failure: FailureHook = _ignore_failure
        self._observers: list[Observer] = []
        self._settings: Settings | None = None
        self._lock = threading.Lock()
        self._broker: Broker | None = None
        self._broker_pid = 0
        self._inherited: list[Broker] = []
        self._stand_in: Broker | None = None
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
        :raises UsageError: it cannot be called with (message, context), is a generator, the
            glob has its job already, or options contradict each other.
        """
        if callable(queues):
            raise UsageError(reason="write @app.job() with parentheses")
        if checkpoint not in ("interval", "message"):
            raise UsageError(
                reason=f"checkpoint={checkpoint!r} is neither 'interval' nor 'message'"
            )
        if policy is not None and not isinstance(policy, Policy):
            raise UsageError(reason=f"policy={policy!r} is no policy: write qdo.Policy(...)")

        def register(function: _Function) -> _Function:
            check_job(function)
            check_placement(function, executor, timeout_seconds, memory_mib, recycle_after)
            placed: dict[str, Any] = {"executor": executor, "timeout_seconds": timeout_seconds}
            placed |= {"memory_mib": memory_mib, "recycle_after": recycle_after}
            placed["policy"] = policy
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

        :raises UsageError: it cannot be called without arguments.
        """
        check_call(factory, (), "job_context")
        manager = factory
        if inspect.isgeneratorfunction(factory):
            manager = contextlib.contextmanager(factory)  # type: ignore[assignment]
        self._job_context = manager
        return factory

    def failure(self, hook: _Function) -> _Function:
        """Register the decorated function as the app's `job_failure`.

        :raises UsageError: it cannot be called with (message, context, error).
        """
        check_call(hook, ("message", "context", "error"), "job_failure")
        self._job_failure = hook
        return hook

    def observer(self, hook: _Function) -> _Function:
        """Register the decorated function: it is called with a `qdo.Event` for each attempt.

        There may be several. It runs in the turn of the queue and should be quick; what it raises
        is logged and changes nothing.

        :raises UsageError: it cannot be called with (event).
        """
        check_call(hook, ("event",), "observer")
        self._observers.append(hook)
        return hook

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Every registered observer, in the order of registration."""
        return tuple(self._observers)

    @property
    def job_context(self) -> ContextFactory:
        """What makes the context manager of a worker; by default it yields an empty dict."""
        return self._job_context

    @property
    def job_failure(self) -> FailureHook:
        """What to call after a failed attempt; by default it does nothing."""
        return self._job_failure

    # --- settings ---

    @property
    def settings(self) -> Settings:
        """The settings in force: those in code < TOML file < environment, or as `use` said.

        File and environment are read at first use.
        """
        if self._settings is None:
            self._settings = self.use(load(defaults=self.given, defaults_origin=self.origin))
        return self._settings

    @property
    def origin(self) -> str:
        """Where settings given in code are said to come from."""
        return f"App({self.name!r})"

    def use(self, settings: Settings) -> Settings:
        """Take settings that were loaded elsewhere, with those in code below them.

        :return: the settings in force.
        :raises UsageError: they are for another app.
        """
        if settings.app not in ("", self.name):
            raise UsageError(
                reason=f"this is app {self.name!r}, but {settings.origin('app')} says "
                f"{settings.app!r}"
            )
        merged = settings.underlaid(self.given, self.origin)
        self._settings = merged if merged.app else merged.merged({"app": self.name}, self.origin)
        return self._settings

    # --- sending ---

    def send(
        self,
        queue: str,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        delay_seconds: float | None = None,
        at: Moment | None = None,
        dedup_key: str | None = None,
        dedup_seconds: float | None = None,
    ) -> str:
        """Store one message and return its id; it is durable when this returns.

        :param body: what JSON can hold (dict, list, str, int, float, bool, None), or bytes,
            which the job gets as bytes.
        :param headers: text by name. With bytes `content-type` says what they are.
        :param delay_seconds: deliver it so much later, not now.
        :param at: deliver it at this time: a datetime with a zone, or a Unix time in seconds.
        :param dedup_key: store nothing and return the id of the first, where a message with this
            key was sent to the queue in the `dedup_seconds` of the first, 300 by default.
        :raises QueueNameError: no znode can have this name.
        :raises UsageError: JSON cannot hold the body, or a value will not do.
        :raises MessageTooLargeError: the broker takes no body of this size.
        :raises UnsupportedError: the broker cannot delay or deduplicate.
        :raises UnreachableError: the broker cannot be reached.
        """
        message = outgoing(
            queue,
            body,
            key,
            headers,
            delay_seconds=delay_seconds,
            at=at,
            dedup_key=dedup_key,
            dedup_seconds=dedup_seconds,
        )
        return self.broker.send_many(self._accepted([message]))[0]

    def send_many(self, messages: Iterable[AnyMessage]) -> list[str]:
        """Store many messages in one go, all or none, and return their ids.

        :param messages: tuples ``(queue, body)``, ``(queue, body, key)`` or
            ``(queue, body, key, headers)``, dicts with the parameters of `send`, or
            `qdo.NewMessage`; order within a queue is kept.
        :raises: as `send`.
        """
        return self.broker.send_many(self._accepted(list(map(outgoing_of, messages))))

    async def asend(
        self,
        queue: str,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        delay_seconds: float | None = None,
        at: Moment | None = None,
        dedup_key: str | None = None,
        dedup_seconds: float | None = None,
    ) -> str:
        """Do as `send`, for coroutines: their loop goes on meanwhile.

        One that is cancelled, as by a time-out, may have sent its message nevertheless.
        """
        message = outgoing(
            queue,
            body,
            key,
            headers,
            delay_seconds=delay_seconds,
            at=at,
            dedup_key=dedup_key,
            dedup_seconds=dedup_seconds,
        )
        return (await self.broker.asend_many(self._accepted([message])))[0]

    async def asend_many(self, messages: Iterable[AnyMessage]) -> list[str]:
        """Do as `send_many`, for coroutines: see `asend`."""
        return await self.broker.asend_many(self._accepted(list(map(outgoing_of, messages))))

    def _accepted(self, messages: list[Outgoing]) -> list[Outgoing]:
        for message in messages:
            if message.terms is not None:
                check_terms(self.broker.capabilities, message.terms, self.settings.broker)
        return messages

    @property
    def broker(self) -> Broker:
        """The app's broker, opened at first use."""
        broker = self._broker
        if broker is not None and self._broker_pid == os.getpid():
            return broker
        return self._open_broker()

    def _open_broker(self) -> Broker:
        from qdo.brokers import open_broker

        with self._lock:
            if self._stand_in is not None:
                return self._stand_in
            if self._broker is not None and self._broker_pid != os.getpid():
                # A parent's files and connections must not be closed by its child.
                self._inherited.append(self._broker)
                self._broker = None
            if self._broker is None:
                self._broker = open_broker(self.settings.broker, self.name)
                self._broker_pid = os.getpid()
            return self._broker

    @contextlib.contextmanager
    def standing_in(self, broker: Broker, settings: Settings) -> Iterator[None]:
        """Use another broker and these settings until the block ends, as `qdo.testing` does.

        :raises UsageError: the app does so already.
        """
        if self._stand_in is not None:
            raise UsageError(
                reason=f"app {self.name!r} is being tested by another TestKit: close that first"
            )
        with self._lock:
            kept = self._broker, self._settings
            self._broker, self._settings, self._stand_in = None, settings, broker
        try:
            yield
        finally:
            with self._lock:
                self._broker, self._settings = kept
                self._stand_in = None

    def close(self) -> None:
        """Let go of the broker; sending again opens it again."""
        with self._lock:
            broker, self._broker = self._broker, None
            if broker is not None and self._broker_pid == os.getpid():
                broker.close()

    def __enter__(self) -> App:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<App {self.name!r} with {len(self._jobs)} jobs>"


@contextlib.contextmanager
def _empty_context() -> Iterator[dict[str, Any]]:
    yield {}


def _ignore_failure(message: Message, context: Any, error: BaseException) -> None:
    """Do nothing: the worker itself logs every failed attempt."""


def _literal_characters(job: Job) -> int:
    return literal_characters(job.queues)
