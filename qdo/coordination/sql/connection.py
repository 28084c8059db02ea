"""kazoo's connection to a database instead of a ZooKeeper server.

`StoreConnection` takes operations from the client's queue, passes them to a `StoreSession`, and
delivers answers and watch events. kazoo's own connection reads answers and events from a socket.
The states and their causes:

==============  ==============================================================================
to              cause
==============  ==============================================================================
CONNECTING      the connection begins; the session was ended or moved; the database is unusable
CONNECTED       the session was begun or resumed
EXPIRED_SESSION the session to resume is gone
AUTH_FAILED     a credential of an unknown scheme
CLOSED          the client was stopped
==============  ==============================================================================
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

from kazoo.exceptions import AuthFailedError, ConnectionDropped, SessionExpiredError
from kazoo.protocol.connection import (
    _CONNECTION_DROP,
    _SESSION_EXPIRED,
    CHILD_EVENT,
    DELETED_EVENT,
    STOP_CONNECTING,
    ConnectionHandler,
)
from kazoo.protocol.serialization import Auth, Close, GetChildren, GetChildren2, Sync, Transaction
from kazoo.protocol.states import EVENT_TYPE_MAP, Callback, KeeperState, WatchedEvent
from kazoo.retry import ForceRetryError
from kazoo.security import Id

from qdo.broker_errors import PostgresqlError
from qdo.coordination.extra_operations import AddWatch
from qdo.coordination.sql import tree
from qdo.coordination.sql.session import OnlookerSession, StoreSession
from qdo.coordination.sql.sqlite_store import SqliteStore
from qdo.coordination.sql.store import UNDONE, BusyError, SessionRow, Store
from qdo.coordination.sql.tree import MAX_OPERATION_BYTES, Event, TreeResult
from qdo.errors import FailureKind, QdoError, SettingsError
from qdo.postgresql.url import SchemaAddress
from qdo.system.clock import clock
from qdo.system.native import original
from qdo.text import how_to_install

log = logging.getLogger(__name__)
_MEANWHILE_SECONDS = 0.05
_native_sleep = original("time", "sleep", time.sleep)
_Result = TypeVar("_Result")
OpenStore = Callable[[Callable[[Callable[[], None]], None]], Store]
_BATCH = 512
_OPERATION_BYTES = 21
_COMMANDS = {
    b"ruok": "imok",
    b"isro": "rw",
    b"envi": "Environment:\nzookeeper.version=3.8.0-embedded\n",
}
# The operations that need a separate transaction. Sync returns the newest zxid up to which the
# session has reported all events.
_ALONE = (Auth.type, Close.type, AddWatch.type, Sync.type)
# An operation, and the object that takes the answer; None if no caller waits.
Pair = tuple[Any, Any]


def _inline(call: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """Run a call in the connection's own thread."""
    return call()


def _in_thread_pool(call: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
    """Run a call in a native thread, while gevent's loop continues."""
    import gevent

    result = gevent.get_hub().threadpool.spawn(_caught, call)
    while not result.ready():
        result.wait(timeout=_MEANWHILE_SECONDS)
        meanwhile()
    value, error = result.get()
    if error is not None:
        raise error
    return value


def _caught(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    # Return the error as a value, because gevent would print the traceback of a raised error.
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - the other thread raises it
        return None, error


def _nothing() -> None:
    return None


def opener(
    path: str | None,
    address: SchemaAddress | None,
    timeout_seconds: float,
    app: str,
    *,
    for_people: bool,
) -> tuple[str, OpenStore]:
    """Return a database's name for logs, and a function that opens its file or schema."""
    if address is None:
        return str(path), partial(SqliteStore, str(path))
    try:
        from qdo.coordination.sql.postgresql_store import PostgresqlStore
    except ImportError as error:
        reason = f"it needs a library ({error}); {how_to_install('postgresql')}"
        raise SettingsError(name="coordinator", reason=reason) from error
    return address.server, lambda offload: PostgresqlStore(
        address, timeout_seconds, app, for_people=for_people
    )


class StoreConnection(ConnectionHandler):
    """A connection to the coordinator in a database.

    :ivar last_fault: the reason why the last attempt to connect failed.
    :param open_store: a function that opens the database; its argument is for `SqliteStore`.
    """

    tls_fault: str | None = None
    client: Any
    handler: Any
    _read_sock: Any

    def __init__(
        self, client: Any, retry: Any, server: str, open_store: OpenStore, logger: Any = None
    ) -> None:
        cast(Any, super()).__init__(client, retry, logger=logger)  # kazoo has no types
        self.server = server
        self.last_fault: str | None = None
        self._waits_until = 0.0
        self._open_store = open_store
        self._identities: tuple[Id, ...] = ()
        self._row: SessionRow | None = None
        self._prepared: Store | None = None
        self._link: StoreSession | None = None
        gevent_like = self.handler.name == "sequential_gevent_handler"
        self._offload = _in_thread_pool if gevent_like else _inline

    def prepare(self) -> None:
        """Open the database for the first attempt to connect; ignore an unreachable server."""
        try:
            self._prepared = self._offload(self._open, _nothing)
        except PostgresqlError as error:
            self.last_fault = str(error)

    def _open(self) -> Store:
        return self._open_store(lambda call: self._offload(call, self._meanwhile))

    def _meanwhile(self) -> None:
        if self._link is not None:
            self._link.beat_if_due()

    def _call(self, link: StoreSession, call: Callable[[], _Result]) -> _Result:
        result: _Result = self._offload(call, _nothing) if link.store.waits_for_network else call()
        return result

    def command(self, word: bytes) -> str:
        """Return the answer to a four-letter command; "" for an unsupported command."""
        return _COMMANDS.get(word, "")

    # --- connecting -------------------------------------------------------------------

    @property
    def waits_until(self) -> float:
        """The time on `clock` until which no session can begin after a failover."""
        link = self._link
        if link is not None:
            self._waits_until = max(self._waits_until, link.waits_until)
        return self._waits_until

    def _connect_loop(self, retry: Any) -> Any:
        if self.client._stopped.is_set() or self._attempt(retry) is STOP_CONNECTING:
            return STOP_CONNECTING
        raise ForceRetryError("Reconnecting")

    def _attempt(self, retry: Any) -> Any:
        """Connect, and serve until the connection ends; STOP_CONNECTING prevents a retry."""
        client = self.client
        if client._state != KeeperState.CONNECTING:
            client._session_callback(KeeperState.CONNECTING)
        try:
            with self._linked() as link:
                self._enter(link)
                retry.reset()
                self._serve(link)
            client._session_callback(KeeperState.CLOSED)
            return STOP_CONNECTING
        except (ConnectionDropped, BusyError, QdoError, OSError) as error:
            self.last_fault = str(error)
            self.logger.warning("Connection dropped: %s", error)
            if client._state != KeeperState.CONNECTING:
                client._session_callback(KeeperState.CONNECTING)
        except AuthFailedError as error:
            self.logger.warning("AUTH_FAILED closing: %s", error)
            client._session_callback(KeeperState.AUTH_FAILED)
            return STOP_CONNECTING
        except SessionExpiredError:
            retry.reset()
            self.logger.warning("Session has expired")
            client._session_callback(KeeperState.EXPIRED_SESSION)
        except Exception as error:  # an error would end the thread, which reconnects
            self.last_fault = repr(error)
            log.exception("%s: an unexpected error; connecting again", self.server)
            if client._state != KeeperState.CONNECTING:
                client._session_callback(KeeperState.CONNECTING)
        return None

    @contextlib.contextmanager
    def _linked(self) -> Iterator[StoreSession]:
        store = self._prepared
        self._prepared = None
        if store is None:
            store = self._offload(self._open, _nothing)
        looks_on = self.client.may_look_on and store.read_only
        kind = OnlookerSession if looks_on else StoreSession
        self._link = kind(store, self._pause, self.client._stopped.is_set)
        try:
            yield self._link
        finally:
            self._offload(self._link.close, self._meanwhile)
            self._link = None

    def _pause(self, seconds: float) -> None:
        """Sleep in the thread that calls the store."""
        in_thread = self._link is not None and self._link.store.waits_for_network
        (_native_sleep if in_thread else self.handler.sleep_func)(seconds)

    def _enter(self, link: StoreSession) -> None:
        client = self.client
        row = self._call(
            link,
            lambda: link.enter(
                client._session_id or 0,
                client._session_passwd,
                client._session_timeout / 1000,
                self._row,
            ),
        )
        self._row = row
        client._session_id = row.id
        client._session_passwd = row.password
        client._protocol_version = 0
        client.negotiated_timeout_seconds = row.timeout_milliseconds / 1000
        client.last_zxid = link.seen
        self._identities = (tree.LOCAL,)
        client._session_callback(KeeperState.CONNECTED)
        for scheme, credential in list(client.auth_data):
            self._authenticate(scheme, credential)

    def _authenticate(self, scheme: str, credential: str) -> None:
        self._identities += (tree.authenticate(scheme, credential),)

    # --- serving ----------------------------------------------------------------------

    def _serve(self, link: StoreSession) -> None:
        while not self._step(link):
            pass

    def _step(self, link: StoreSession) -> bool:
        """Serve the next operations or events; return whether the client closed its session."""
        # Keep this function separate. Otherwise the local variables of an idle connection would
        # keep answered operations, their watchers, and the watchers' objects alive.
        woken = self._wait(link)
        batch = self._take()
        if batch:
            if self._answer(link, batch):
                return True
        elif woken:
            self._fire_all(self._call(link, partial(link.look, watching=self._watching())))
        if clock() >= link.due:
            self._fire_all(self._call(link, partial(link.tick, watching=self._watching())))
        self.client.last_zxid = link.seen
        return False

    def _wait(self, link: StoreSession) -> bool:
        """Wait for operations, a wakeup, or the next tick; return whether a wakeup arrived."""
        at_once = self.client._queue or link.store.woken
        timeout = 0.0 if at_once else max(0.0, link.due - clock())
        ready = self.handler.select([link.store.bell, self._read_sock], [], [], timeout)[0]
        if self._read_sock in ready:
            self._read_sock.recv(65536)
        return (link.store.bell in ready or link.store.woken) and link.woken()

    def _watching(self) -> bool:
        client = self.client
        return bool(client._data_watchers or client._child_watchers or client.tree_watchers)

    def _take(self) -> list[Pair]:
        """Take the operations for one transaction from the client's queue."""
        client = self.client
        batch: list[Pair] = []
        size = 0
        while client._queue and len(batch) < _BATCH:
            operation, answer = client._queue[0]
            one = _size_of(operation)
            fault = _fault_of(operation, one, client.drop_reason)
            alone = fault is not None or operation.type in _ALONE
            size += one
            if batch and (alone or size > MAX_OPERATION_BYTES):
                break
            if fault is not None:
                raise fault
            client._queue.popleft()
            client._pending.append((operation, answer, 0))
            batch.append((operation, answer))
            if alone:
                break
        return batch

    def _answer(self, link: StoreSession, batch: list[Pair]) -> bool:
        """Perform operations and deliver their answers; return whether they closed the session."""
        operation, answer = batch[0]
        if operation.type == Close.type:
            self._call(link, link.end)
            self.client.session_over = True
            self.client._pending.clear()
            return True
        if operation.type == Auth.type:
            self._answer_auth(operation, answer)
            return False
        if operation.type == AddWatch.type:
            # From now on, `_watching` is true, so the session reports all changes since
            # `link.seen`.
            self.client._pending.popleft()
            answer.set(True)
            return False
        try:
            operations = [operation for operation, _ in batch]
            watching = self._watching()
            act = partial(link.perform, operations, self._identities, watching=watching)
            performed = self._call(link, act)
        except UNDONE as error:
            if len(batch) > 1 and error.kind is FailureKind.REFUSED:
                for each in batch:
                    self._answer(link, [each])
                return False
            self._refuse(batch, error)
            return False
        self.client.last_zxid = link.seen
        self._fire_all(performed.foreign)
        for (operation, answer), outcome in zip(batch, performed.outcomes, strict=True):
            self.client._pending.popleft()
            self._fire_all(outcome.events)
            self._settle(operation, answer, outcome)
        return False

    def _answer_auth(self, operation: Auth, answer: Any) -> None:
        self.client._pending.popleft()
        try:
            self._authenticate(operation.scheme, operation.auth)
        except AuthFailedError as error:
            answer.set_exception(error)
            raise
        answer.set(True)

    def _refuse(self, batch: list[Pair], error: Exception) -> None:
        for _, answer in batch:
            self.client._pending.popleft()
            if answer is not None:
                answer.set_exception(error)

    def _settle(self, operation: Any, answer: Any, outcome: TreeResult) -> None:
        client = self.client
        if outcome.error is not None:
            if answer is not None:
                answer.set_exception(outcome.error)
            return
        watcher = getattr(operation, "watcher", None)
        if watcher and not client._stopped.is_set():
            children = isinstance(operation, (GetChildren, GetChildren2))
            watchers = client._child_watchers if children else client._data_watchers
            watchers[operation.path].add(watcher)
        if answer is not None:
            result = outcome.result
            if type(operation) is Transaction:
                result = Transaction.unchroot(client, result)
            answer.set(result)

    # --- watches ----------------------------------------------------------------------

    def _fire_all(self, events: list[Event]) -> None:
        for kind, path in events:
            self._fire(kind, path)

    def _fire(self, kind: int, path: str) -> None:
        """Call the watches that an event triggers, and remove these watches."""
        client = self.client
        if kind != CHILD_EVENT:
            client.tree_watchers.fire(kind, path, client)
        watchers: list[Any] = []
        if kind != CHILD_EVENT:
            watchers.extend(client._data_watchers.pop(path, ()))
        if kind in (CHILD_EVENT, DELETED_EVENT):
            watchers.extend(client._child_watchers.pop(path, ()))
        if client._stopped.is_set():
            return
        for watcher in watchers:
            event = WatchedEvent(EVENT_TYPE_MAP[kind], client._state, client.unchroot(path))
            client.handler.dispatch_callback(Callback("watch", watcher, (event,)))


def _fault_of(operation: Any, size: int, drop_reason: str) -> Exception | None:
    """Return the error with which an operation ends the connection itself, or None."""
    if operation is _SESSION_EXPIRED:
        return SessionExpiredError("Session expired: Testing")
    if operation is _CONNECTION_DROP:
        return ConnectionDropped(drop_reason)
    if size > MAX_OPERATION_BYTES:
        return ConnectionDropped(f"a request of {size} bytes exceeds ZooKeeper's limit")
    return None


def _size_of(operation: Any) -> int:
    """Return the approximate network size of an operation in bytes."""
    if type(operation) is Transaction:
        return sum(map(_size_of, operation.operations))
    data = getattr(operation, "data", None) or b""
    return _OPERATION_BYTES + len(getattr(operation, "path", "")) + len(data)
