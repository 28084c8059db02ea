"""The services of the coordinator for a process that is not a worker.

The services are documents, live settings and locks. Each service has a separate connection, and
opens it at the first use, after a fork, and after the end of its session. A service raises
CoordinatorUnreachableError if the coordinator does not respond within its timeout.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from qdo.errors import CoordinatorUnreachableError, StaleCopyError, UnreachableError
from qdo.jobs.middleware import Middleware
from qdo.message import Batch, Message
from qdo.settings.hosts import describe_process, share_files, writer_shown
from qdo.system.clock import clock
from qdo.system.per_process import PerProcess
from qdo.text import describe

if TYPE_CHECKING:
    from qdo.connections.registration import KeptRegistration
    from qdo.coordination.client import Client
    from qdo.coordination.side import SideConnection
    from qdo.coordination.znodes.layout import Layout
    from qdo.fleet.documents import Documents, DocumentStore
    from qdo.fleet.limit_node import DeclaredLimit
    from qdo.fleet.locks import CoordinatorLocks, LockService
    from qdo.settings.live import LiveSettings, SettingsInForce
    from qdo.settings.settings import Settings

# The header of messages that a caller has sent with ``after=``.
AFTER = "qdo-after"
AFTER_SECONDS = 5.0
_IS_TIME = re.compile("[0-9]{1,19}", re.ASCII).fullmatch
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Functions import the coordinator's modules late, because most senders do not need them.


def _at_home(function: Callable[[], _Result]) -> _Result:
    from qdo.system.home_loop import at_home

    return at_home(function)


def open_client(settings: Settings, app: str) -> tuple[Client, Layout]:
    from qdo.coordination.client import connect
    from qdo.coordination.side import fitting_handler
    from qdo.coordination.znodes.layout import Layout
    from qdo.settings.coordinator_access import coordinator_access

    share_files(settings)
    layout = Layout.of(app, settings.namespace)
    client = connect(
        settings.coordinator,
        access=coordinator_access(settings, layout),
        handler=fitting_handler(),
        session_timeout_seconds=settings.session_timeout_seconds,
    )
    client.open(settings.connect_seconds)
    return client, layout


class AppDocuments:
    """The document sets of an app; `connection` is the document store of this process."""

    def __init__(self, app: str, settings: Callable[[], Settings]) -> None:
        self._sets: dict[str, Documents] = {}

        def open_store() -> DocumentStore:
            from qdo.fleet.documents import CoordinatorDocuments

            client, layout = open_client(settings(), app)
            seconds = settings().connect_seconds
            return CoordinatorDocuments(client, layout, seconds, writer_shown(settings()))

        self.connection = PerProcess(open_store, run=_at_home, owner=app)

    def __getitem__(self, name: str) -> Documents:
        """Return a set of documents; each call returns the same object."""
        from qdo.fleet.documents import Documents

        return self._sets.setdefault(name, Documents(name, self.connection.get))

    def __iter__(self) -> Iterator[Documents]:
        """Iterate over the sets that the app has named."""
        return iter(list(self._sets.values()))

    def middleware(self) -> tuple[Middleware, Middleware]:
        """Return middleware that gives each job documents as new as its message requires."""
        return Middleware(self._before, "sync"), Middleware(self._before_async, "async")

    def _before(self, call_next: Any, message: Message | Batch, context: Any) -> None:
        self._wait_for(message)
        call_next(message, context)

    async def _before_async(self, call_next: Any, message: Message | Batch, context: Any) -> None:
        if _after(message):
            import asyncio  # importing asyncio takes 20 ms, and only coroutines need it

            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._wait_for, message)
        await call_next(message, context)

    def _wait_for(self, message: Message | Batch) -> None:
        """Wait for documents that are as new as a message requires.

        Late documents must not stop a queue. After `AFTER_SECONDS` in total for all sets, the job
        gets the present documents.
        """
        after = _after(message)
        if not after:
            return
        until = clock() + AFTER_SECONDS
        for documents in self:
            try:
                if (left := until - clock()) <= 0:
                    name = f"documents {documents.name!r}"
                    raise StaleCopyError(what=name, seconds=AFTER_SECONDS)
                documents.fresh(after, left)
            except UnreachableError as error:
                _log.warning(
                    "message %s of queue %s: its job gets older documents than it asks for: %s",
                    _first(message).id,
                    _first(message).queue,
                    describe(error),
                )


def _first(message: Message | Batch) -> Message:
    return message[0] if isinstance(message, Batch) else message


def _after(message: Message | Batch) -> int:
    """Return the minimum time of documents that a message requires; 0 if it requires none."""
    messages = message if isinstance(message, Batch) else (message,)
    asked = [text for each in messages if (text := each.headers.get(AFTER))]
    return max((int(text) for text in asked if _IS_TIME(text)), default=0)


class LiveConnection:
    """The live settings, read over a separate connection."""

    def __init__(self, side: SideConnection, live: LiveSettings) -> None:
        self._side = side
        self._live = live

    @property
    def now(self) -> Settings:
        return self._live.in_force.now

    def close(self) -> None:
        self._side.close()


def live_connection(
    app: str, settings: Callable[[], Settings], code_origin: str
) -> PerProcess[LiveConnection | SettingsInForce]:
    return PerProcess(lambda: _open_live(app, settings(), code_origin), run=_at_home, owner=app)


def _open_live(app: str, settings: Settings, code_origin: str) -> LiveConnection:
    """Open a connection, and wait for the live settings."""
    from qdo.coordination.side import SideConnection
    from qdo.fleet.settings_machine import SettingsWatch
    from qdo.settings.live import LiveSettings

    client, layout = open_client(settings, app)
    side = SideConnection(client)
    live = LiveSettings(settings, code_origin)
    watch = SettingsWatch(layout.fleet.settings, live)
    side.add(watch)
    if not side.wait(watch.when_read, settings.connect_seconds):
        side.close()
        reason = f"no answer within {settings.connect_seconds:g} s"
        raise CoordinatorUnreachableError(url=settings.coordinator, reason=reason)
    return LiveConnection(side, live)


def lock_connection(
    app: str, settings: Callable[[], Settings], limits: Mapping[str, DeclaredLimit]
) -> PerProcess[LockService]:
    def is_over(locks: Any) -> bool:
        return bool(locks.over)

    return PerProcess(lambda: open_locks(app, settings(), limits), is_over, _at_home, app)


def kept_registration(
    app: str, locks: PerProcess[LockService], settings: Callable[[], Settings]
) -> PerProcess[KeptRegistration]:
    def register() -> KeptRegistration:
        from qdo.connections.registration import KeptRegistration

        return KeptRegistration(app, locks.get, settings().connect_seconds)

    return PerProcess(register, run=_at_home, owner=app)


def open_locks(
    app: str, settings: Settings, limits: Mapping[str, DeclaredLimit] = MappingProxyType({})
) -> CoordinatorLocks:
    """Open a connection for locks and sections of an app."""
    from qdo.coordination.side import LeasedConnection
    from qdo.coordination.transactions import make_folder
    from qdo.coordination.znodes.layout import clients_of
    from qdo.fleet.locks import CoordinatorLocks

    client, layout = open_client(settings, app)
    make_folder(client, clients_of(layout.root))
    connection = LeasedConnection(client, layout, describe_process(settings))
    return CoordinatorLocks(connection, layout, writer_shown(settings), limits)
