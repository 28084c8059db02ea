"""The app of a Django project, made of ``settings.QDO``."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections

from qdo.app import App
from qdo.callables import is_async
from qdo.connections.broker import OpenBroker
from qdo.contrib.django.databases import FILES, PREFIX, resolved_address
from qdo.errors import SettingsError
from qdo.jobs.middleware import Middleware
from qdo.settings.settings import check_names

_Hook = TypeVar("_Hook", bound=Callable[..., Any])

# An object for each job and hook that runs on the asyncio loop of this process.
_coroutines: set[object] = set()

EXAMPLE = 'QDO = {"app": "shop", "broker": "django:default"}'


class DjangoApp(App):
    """An app whose jobs and hooks use Django's ORM, and leave no connections behind.

    While Django's test environment is set up, messages are kept in memory, as Django keeps mail.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.hooks.own_middleware += [
            Middleware(_middleware, "sync"),
            Middleware(_async_middleware, "async"),
        ]

    def failure(self, hook: _Hook) -> _Hook:
        super().failure(_closing(hook))
        return hook

    def observer(self, hook: _Hook) -> _Hook:
        super().observer(_closing(hook))
        return hook

    def _open_broker(self) -> OpenBroker:
        if not _is_test_environment():
            return super()._open_broker()
        from qdo.testing.faults import SendingBroker
        from qdo.testing.memory_broker import MemoryStore

        memory = SendingBroker(MemoryStore(), self.name, lambda *point: None, lambda id: None)
        return OpenBroker(memory, None)


@functools.cache
def project_app() -> DjangoApp:
    """Return the app of this Django project; raise SettingsError if ``settings.QDO`` is wrong."""
    given = getattr(settings, "QDO", None)
    if not isinstance(given, dict) or not isinstance(given.get("app"), str):
        raise SettingsError(
            name="QDO",
            reason=f"Django's settings must have a dict that names the app, as in {EXAMPLE},"
            f" got {given!r:.100}",
        )
    check_names(given, "settings.QDO")
    chosen = {name: value for name, value in given.items() if name != "app"}
    broker = str(chosen.get("broker", ""))
    for name in FILES:
        if str(chosen.get(name, "")).startswith(PREFIX):
            chosen[name] = resolved_address(chosen[name], name)
    # Without a coordinator, PostgreSQL is both, wherever the settings in force have the broker.
    if str(chosen.get("broker", "")).startswith("sqlite:") and broker.startswith(PREFIX):
        chosen.setdefault("coordinator", resolved_address(broker, "coordinator"))
    known = {name: value for name, value in chosen.items() if value is not None}
    return DjangoApp(given["app"], **known)


def close_connections() -> None:
    """Close the connections of this greenlet or thread, except those in a transaction of a test."""
    for connection in connections.all(initialized_only=True):
        connection.queries_log.clear()
        if not connection.in_atomic_block:
            connection.close()


@contextlib.contextmanager
def _own_connections() -> Iterator[None]:
    # Greenlets and threads of jobs come and go, so CONN_MAX_AGE would keep a connection for each.
    try:
        yield
    finally:
        close_connections()


@contextlib.asynccontextmanager
async def _shared_connections() -> AsyncIterator[None]:
    # Django runs the queries of all coroutines on one thread, with one connection. Between two
    # queries of a coroutine, it may hold a cursor of the server, as in `aiterator`.
    own = object()
    _coroutines.add(own)
    try:
        yield
    finally:
        _coroutines.discard(own)
        if not _coroutines:
            await sync_to_async(close_connections)()


def _closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook or middleware that closes the connections of its calls."""
    return (_shared_connections() if is_async(function) else _own_connections())(function)


@_closing
def _middleware(call_next: Callable[..., None], message: Any, context: Any) -> None:
    call_next(message, context)


@_closing
async def _async_middleware(call_next: Callable[..., Any], message: Any, context: Any) -> None:
    await call_next(message, context)


def _is_test_environment() -> bool:
    """Return whether `manage.py test` or pytest-django runs, as opposed to a test of qdo's kit."""
    utils: Any = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")
