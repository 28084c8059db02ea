"""What an app does without any job: its settings, and sending messages."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from qdo.errors import SettingsError, UsageError
from qdo.sending import AnyMessage, Moment, check_terms, outgoing, outgoing_of
from qdo.settings import Settings, check_names, load

if TYPE_CHECKING:
    from qdo.brokers.base import Broker, Outgoing
    from qdo.coordination.ringing import Ringer

_Self = TypeVar("_Self", bound="Sender")


class Sender:
    """The sending half of `qdo.App`.

    :param given: settings given in code.
    :raises UnknownSettingError: with the nearest known name.
    :raises SettingsError: a name or value will not do.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        check_names(given, f"App({name!r})")
        self.name = name
        self.given: Mapping[str, Any] = {**given, "app": name}
        """Settings given in code."""
        if not name:
            raise SettingsError(name="app", reason="it is empty")
        Settings(**self.given)
        self._settings: Settings | None = None
        self._lock = threading.Lock()
        _senders.add(self)
        self._broker: Broker | None = None
        self._ringer: Ringer | None = None
        self._broker_pid = 0
        self._inherited: list[Broker] = []
        self._stand_in: Broker | None = None

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
        from qdo.ringing import ring_for

        with self._lock:
            if self._stand_in is not None:
                return self._stand_in
            if self._broker is not None and self._broker_pid != os.getpid():
                # A parent's files and connections must not be closed by its child.
                self._inherited.append(self._broker)
                self._broker = None
            if self._broker is None:
                broker = open_broker(self.settings.broker, self.name)
                self._ringer = ring_for(broker, self.settings, self.name)
                self._broker_pid = os.getpid()
                self._broker = broker
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
            ringer, self._ringer = self._ringer, None
            if broker is not None and self._broker_pid == os.getpid():
                broker.close()
            if ringer is not None:
                ringer.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _renew_locks() -> None:
    """Let go of what other threads of the parent held, who are not in a forked child."""
    for sender in list(_senders):
        sender._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
