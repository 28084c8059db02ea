"""The part of an app that needs no jobs: the settings and the functions that send."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from qdo.brokers.base import LASTING_DEDUP_SECONDS, SendOptions
from qdo.connections.broker import OpenBroker, open_broker_with_doorbell
from qdo.errors import SettingsError, UnsupportedError, UsageError
from qdo.message import Message
from qdo.sending.messages import (
    AnyMessage,
    MessageOptions,
    NewMessage,
    TypeOf,
    check_options,
    check_size,
    encrypted,
    names_error,
    outgoing_of,
    with_defaults,
)
from qdo.sending.once import release_numbers
from qdo.settings.settings import Settings, check_names, code_origin
from qdo.settings.sources import load
from qdo.system.home_loop import at_home
from qdo.system.per_process import PerProcess
from qdo.system.twins import twin, warn_if_blocking

if TYPE_CHECKING:
    from qdo.brokers.base import Broker, Outgoing
    from qdo.jobs.timers import Missed, Timer
    from qdo.webhooks import DeclaredWebhook

# Of `Sender.send`, for errors.
_PARAMETERS = (*NewMessage.__slots__, "connection")
_Result = TypeVar("_Result")


class Sender:
    """The sending half of `qdo.App`."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        check_names(given, code_origin(name))
        self.name = name
        self.given: Mapping[str, Any] = {**given, "app": name}
        """Settings given in code."""
        if not name:
            raise SettingsError(name="app", reason="it must not be empty")
        if ":" in name:
            raise SettingsError(
                name="app", reason=f"a name must not contain ':', as MODULE:APP does, got {name!r}"
            )
        Settings(**self.given)
        self.default_headers: Callable[[], Mapping[str, str]] | None = None
        """Returns headers for each message that is sent; those of the message itself win."""
        self.type_of: TypeOf | None = None
        """Returns type and kind of a body for a queue; None if no job has types or kinds."""
        self.webhooks: dict[str, DeclaredWebhook] = {}
        """The webhooks that `webhook` has declared, by path."""
        self.timers: dict[str, Timer] = {}
        """The timers that `timer` has declared, by name."""
        self._settings: Settings | None = None
        self._broker = PerProcess(self._open_broker, run=at_home, owner=name)

    # --- settings ---

    @property
    def settings(self) -> Settings:
        """The current settings, from code < TOML file < environment, or from `use`."""
        if self._settings is None:
            self.use(load(defaults=self.given, defaults_origin=self.origin))
            return self.anchor()
        return self._settings

    @property
    def origin(self) -> str:
        """The origin of settings in the code, as `qdo config` and errors show this origin."""
        return code_origin(self.name)

    def use(self, settings: Settings) -> Settings:
        """Use settings that a caller has loaded. They override the settings in the code.

        A setting `app` of the form MODULE:APP names the app that workers and commands import. This
        setting does not affect an imported app.
        """
        if settings.app not in ("", self.name) and not settings.target:
            raise UsageError(
                reason=f"this is app {self.name!r}, but {settings.origin('app')} names "
                f"{settings.app!r}"
            )
        merged = settings.underlaid(self.given, self.origin)
        if merged.app != self.name:
            merged = merged.merged({"app": self.name}, self.origin)
        self._settings = merged
        return merged

    def anchor(self) -> Settings:
        """Make the paths in the settings absolute; return the settings."""
        # Only long-running processes call this method. Commands show the paths as an operator wrote
        # them.
        self._settings = anchored = self.settings.anchored()
        return anchored

    # --- sending ---

    def send(
        self,
        queue: str,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        connection: Any = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Store one message durably, and return its id.

        >>> id = app.send("mail-eu", {"to": "Ada"}, key="ada", delay_seconds=60)

        :param body: a JSON value, bytes, or an object of a class with fields, such as a dataclass
            (see "Types of bodies"). The job gets a tuple as a list.
        :param headers: text by name. If the body is bytes, `content-type` describes its format.
        :param delay_seconds: deliver the message after this delay.
        :param at: deliver the message at this time: a datetime with a zone, or a Unix time in
            seconds.
        :param dedup_key: if a message with this key was sent to the queue within the
            `dedup_seconds` of the earlier message (default 300), store nothing and return the
            earlier id.
        :param unique: likewise while an earlier message with this key waits or runs.
        :param after: a version that `put` of a set of documents returned. The message's job waits
            up to 5 seconds for documents of this version or a newer version. Then the job uses the
            documents that its process has.
        :param once: the message whose job sends. For 7 days, later attempts of this message do not
            store the messages of earlier attempts again. Use only one of these three.
        :param priority: 0 to 9, the smallest first, for jobs with ``order="priority"``:
            `qdo.URGENT` (0), `HIGH` (3), `NORMAL` (5) or `LOW` (7).
        :param kind: the kind of the message, by which its queue's jobs share the messages. The
            default is the name of the body's class, if the class has fields.
        :param connection: a connection of psycopg, a connection or session of SQLAlchemy, or a
            connection or alias of Django, to the database of a PostgreSQL broker. The message is
            sent if, and only if, the transaction of this connection commits.
        :raises QueueNameError: the queue's name is invalid. It must have 1 to 200 characters
            without "/", control characters and emoji. ".", ".." and "zookeeper" are reserved.
        :raises UsageError: the body would not arrive unchanged, the queue's job in this app takes
            another type or kind, or a value is invalid.
        :raises MessageTooLargeError: the body is larger than the broker's limit.
        :raises UnsupportedError: the broker cannot delay, deduplicate, or send in a transaction.
        :raises UnreachableError: the broker cannot be reached.
        """
        warn_if_blocking(connection)
        try:
            message = NewMessage(queue, body, key, headers, **options)
        except TypeError as error:
            raise names_error("the parameters of send", options, _PARAMETERS) from error
        return self._store([outgoing_of(message, None, self.type_of)], connection)[0]

    def send_many(
        self,
        messages: Iterable[AnyMessage],
        *,
        once: Message | None = None,
        connection: Any = None,
    ) -> list[str]:
        """Store many messages at once, all or none, and return their ids.

        :param messages: tuples ``(queue, body)``, ``(queue, body, key)`` or
            ``(queue, body, key, headers)``, dicts with the parameters of `send`, or
            `qdo.NewMessage`. Messages of a queue keep their order.
        :param once: as in `send`, for all messages that do not have their own `once`.
        :param connection: as in `send`.
        """
        warn_if_blocking(connection)
        return self._store((outgoing_of(each, once, self.type_of) for each in messages), connection)

    def _store(self, messages: Iterable[Outgoing], connection: Any = None) -> list[str]:
        checked: list[Outgoing] = []
        try:
            checked.extend(messages)  # keeps the messages before an invalid message
            outgoing = self.ready(checked)
            if connection is not None:
                return self.broker.send_within(connection, outgoing)
            return self.broker.send_many(outgoing)
        except BaseException:
            release_numbers(checked)
            raise

    def _store_once(self, messages: Sequence[Outgoing], keys: Sequence[str]) -> list[str]:
        """Store messages under deduplication keys.

        Omit the keys if the queue does not support them.
        """
        window = self.broker.capabilities.dedup_seconds or LASTING_DEDUP_SECONDS
        keyed = [
            replace(each, terms=SendOptions(dedup_key=key, dedup_seconds=window))
            for each, key in zip(messages, keys, strict=True)
        ]
        try:
            return self._store(keyed)
        except UnsupportedError:  # Kinesis and standard queues of SQS
            return self._store(messages)

    async def asend(
        self,
        queue: str,
        body: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        connection: Any = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Send like `send`, from a coroutine, without blocking its loop.

        If a call is cancelled, for example by a timeout, the message may have been sent.

        :param connection: as in `send`, or an AsyncSession or AsyncConnection of SQLAlchemy with
            ``postgresql+psycopg://``, or a `psycopg.AsyncConnection`.
        """
        try:
            message = NewMessage(queue, body, key, headers, **options)
        except TypeError as error:
            raise names_error("the parameters of asend", options, _PARAMETERS) from error
        return (await self.asend_many([message], connection=connection))[0]

    async def asend_many(
        self,
        messages: Iterable[AnyMessage],
        *,
        once: Message | None = None,
        connection: Any = None,
    ) -> list[str]:
        """Send like `send_many`, from a coroutine (see `asend`)."""
        if connection is not None:
            return await self._within(
                connection, lambda plain: self.send_many(messages, once=once, connection=plain)
            )
        return await self._astore(outgoing_of(each, once, self.type_of) for each in messages)

    async def _opened(self) -> None:
        """Open the broker before the loop reads `broker`, which would open it here."""
        if not self._broker.is_open():
            await self.aopen()

    async def _within(self, connection: Any, call: Callable[[Any], _Result]) -> _Result:
        """Run a call in the transaction of a coroutine's connection."""
        from qdo.system.async_connections import run_within

        await self._opened()
        return await run_within(connection, call)

    async def _astore(self, messages: Iterable[Outgoing]) -> list[str]:
        checked: list[Outgoing] = []
        try:
            await self._opened()
            checked.extend(messages)
            return await self.broker.asend_many(self.ready(checked))
        except BaseException:
            release_numbers(checked)
            raise

    def webhook(
        self,
        path: str,
        *,
        queue: str,
        verify: str,
        secret: str | None = None,
        max_bytes: int = 1 << 20,
        kind: str | None = None,
    ) -> None:
        """Declare a webhook. `qdo ingest` stores each request to its path as a message of a queue.

        >>> app.webhook("/github", queue="github", verify="github", secret="env:GITHUB_SECRET")

        :param verify: the signature of the sender: "github", "gitlab", "standard", "stripe", or
            "none".
        :param secret: the place of the sender's secret, such as "env:NAME" or "file:PATH". While
            you replace the secret, give two places, separated by a comma. Only receivers read the
            secret.
        :param max_bytes: the maximum size of a body.
        :param kind: the kind of the messages, as in `send`.
        """
        from qdo.webhooks import DeclaredWebhook

        webhook = DeclaredWebhook(path, queue, verify, secret, max_bytes, kind)
        if path in self.webhooks:
            raise UsageError(reason=f"app {self.name!r} already has a webhook for {path!r}")
        self.webhooks[path] = webhook

    def timer(
        self,
        name: str,
        cron: str | None = None,
        *,
        every_seconds: int | None = None,
        tz: str = "UTC",
        queue: str,
        missed: Missed = "once",
        unless_waiting: bool = False,
    ) -> None:
        """Send a message to a queue on a schedule while a worker of the app runs.

        >>> app.timer("nightly", "30 2 * * *", tz="Europe/Berlin", queue="reports")

        The body has the keys `timer`, `at` (the time in UTC) and `missed`.

        :param cron: five fields: minute, hour, day of the month, month, day of the week.
        :param every_seconds: a period instead of `cron`. Periods count from 1970.
        :param tz: name of a time zone, for `cron`.
        :param missed: the reaction to occurrences that were missed because no worker ran. "once"
            sends the latest missed occurrence. "skip" sends no occurrence older than a minute.
        :param unless_waiting: send nothing while a message waits in the queue.
        """
        from qdo.jobs.timers import Timer

        timer = Timer(name, queue, cron, every_seconds, tz, missed, unless_waiting)
        timer.check()
        if name in self.timers:
            raise UsageError(reason=f"timer {name!r} is declared twice; give each its own name")
        self.timers[name] = timer

    def ready(self, messages: list[Outgoing]) -> list[Outgoing]:
        """Return messages with the app's headers, encrypted if the settings require encryption."""
        outgoing = with_defaults(messages, self.default_headers)
        limit = self.settings.max_body_bytes
        for message in outgoing:
            if len(message.body) > limit:
                check_size(message, limit)
            if message.terms is not None:
                check_options(self.broker.capabilities, message.terms, self.settings.broker)
        return encrypted(outgoing, self.settings, self.name, self._stream_of)

    @property
    def broker(self) -> Broker:
        """The app's broker. The first use opens the broker."""
        return self._broker.get().broker

    def _stream_of(self, queue: str) -> str:
        # Open the broker only now, because not every sender needs streams.
        return self.broker.stream_of(queue)

    def _open_broker(self) -> OpenBroker:
        return open_broker_with_doorbell(self.settings, self.name)

    @contextlib.contextmanager
    def override_broker(self, broker: Broker, settings: Settings) -> Iterator[None]:
        """Use another broker and other settings until the block ends (for `qdo.testing`)."""
        with self._broker.override(OpenBroker(broker, None)):
            kept = self._settings
            self._settings = settings
            try:
                yield
            finally:
                self._settings = kept

    def open(self) -> None:
        """Open the broker now, so that the first send does not wait for it.

        :raises UnreachableError: the broker cannot be reached.
        """
        warn_if_blocking()
        self._broker.get()

    aopen = twin(open)

    def close(self) -> None:
        """Close the broker. The next send opens the broker again."""
        warn_if_blocking()
        self._broker.close()

    aclose = twin(close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self.aopen()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
