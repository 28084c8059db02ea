"""The documents of an app in this process."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qdo.errors import UnreachableError, UsageError
from qdo.jobs.middleware import Middleware
from qdo.message import Batch, Message
from qdo.text import describe

AFTER = "qdo-after"
"""Header of messages that were sent with ``after=``."""
AFTER_SECONDS = 5.0
_IS_TIME = re.compile("[0-9]{1,19}", re.ASCII).fullmatch

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable

    from qdo.fleet.document_store import CoordinatorDocuments, DocumentStore
    from qdo.fleet.documents import Documents
    from qdo.settings.settings import Settings


class AppDocuments:
    """The sets of documents of an app; the first use of one opens a connection.

    :param settings: returns the settings of the app.
    """

    def __init__(self, app: str, settings: Callable[[], Settings]) -> None:
        self._app = app
        self._settings = settings
        self._lock = threading.Lock()
        self._sets: dict[str, Documents] = {}
        self._opened: CoordinatorDocuments | None = None
        self._inherited: list[CoordinatorDocuments] = []
        self._stand_in: DocumentStore | None = None
        os.register_at_fork(after_in_child=self._renew_lock)

    def __bool__(self) -> bool:
        """Return whether the app has named a set of documents."""
        return bool(self._sets)

    def __getitem__(self, name: str) -> Documents:
        """Return a set, the same object for each call."""
        # Imported late: most apps have none, and it imports the coordinator.
        from qdo.fleet.documents import Documents

        with self._lock:
            if name not in self._sets:
                self._sets[name] = Documents(name, self.store)
            return self._sets[name]

    def __iter__(self) -> Iterator[Documents]:
        """Return the sets that the app has named."""
        return iter(list(self._sets.values()))

    def store(self) -> DocumentStore:
        """Return the store of this process.

        :raises CoordinatorUnreachableError: the coordinator does not respond.
        """
        opened = self._stand_in or self._opened
        if opened is None or (opened is self._opened and self._opened.pid != os.getpid()):
            return self._open()
        return opened

    def _open(self) -> DocumentStore:
        with self._lock:
            if self._opened is not None and self._opened.pid != os.getpid():
                # A forked child must not close its parent's connection.
                self._inherited.append(self._opened)
                self._opened = None
            if self._opened is None:
                self._opened = _open_store(self._settings(), self._app)
            return self._opened

    @contextmanager
    def override(self, store: DocumentStore) -> Iterator[None]:
        """Use another store until the block ends, for `qdo.testing`."""
        if self._stand_in is not None:
            raise UsageError(reason=f"app {self._app!r} is being tested by another TestKit")
        self._stand_in = store
        try:
            yield
        finally:
            self._stand_in = None

    def middleware(self) -> tuple[Middleware, Middleware]:
        """Return the middleware by which jobs see documents as new as their messages ask for."""
        return Middleware(self._before, "sync"), Middleware(self._before_async, "async")

    def _before(self, call_next: Any, message: Message | Batch, context: Any) -> None:
        self._wait_for(message)
        call_next(message, context)

    async def _before_async(self, call_next: Any, message: Message | Batch, context: Any) -> None:
        if _after(message):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._wait_for, message)
        await call_next(message, context)

    def _wait_for(self, message: Message | Batch) -> None:
        """Wait for documents that are as new as a message asks for.

        Late documents must not stop a queue: after `AFTER_SECONDS` the job gets what there is.
        """
        after = _after(message)
        if not after:
            return
        for documents in self:
            try:
                documents.fresh(after, AFTER_SECONDS)
            except UnreachableError as error:
                _log.warning(
                    "message %s of queue %s: its job runs with documents that are too old: %s",
                    _first(message).id,
                    _first(message).queue,
                    describe(error),
                )

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _renew_lock(self) -> None:
        # Another thread of the parent may have held it.
        self._lock = threading.Lock()


def _first(message: Message | Batch) -> Message:
    return message[0] if isinstance(message, Batch) else message


def _after(message: Message | Batch) -> int:
    """Return the time of documents that a message asks for, 0 without one."""
    messages = message if isinstance(message, Batch) else (message,)
    asked = [text for each in messages if (text := each.headers.get(AFTER))]
    return max((int(text) for text in asked if _IS_TIME(text)), default=0)


def _open_store(settings: Settings, app: str) -> CoordinatorDocuments:
    from qdo.coordination.client import connect
    from qdo.coordination.side import fitting_handler
    from qdo.coordination.znodes.layout import Layout
    from qdo.fleet.document_store import CoordinatorDocuments
    from qdo.settings.coordinator_access import coordinator_access
    from qdo.settings.shared_files import share_files

    share_files(settings)
    layout = Layout.of(app, settings.namespace)
    client = connect(
        settings.coordinator,
        access=coordinator_access(settings, layout),
        handler=fitting_handler(),
        session_timeout_seconds=settings.session_timeout_seconds,
    )
    client.open(settings.connect_seconds)
    return CoordinatorDocuments(client, layout, settings.connect_seconds)
