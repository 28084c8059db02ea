"""A broker in memory, which runs the statements of the embedded broker on a SQLite database.

A `MemoryStore` replaces the file of the embedded broker. The store outlives the simulated processes
that use it. Several brokers on one store represent several processes that share one file. The
brokers use the same connection, which sees uncommitted changes. Therefore transactions and reads
hold `unforked`.
"""

from __future__ import annotations

import random
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

from qdo.broker_errors import UnusableBrokerError
from qdo.brokers.base import Outgoing
from qdo.brokers.embedded.broker import SqliteBroker
from qdo.brokers.embedded.dead_letters import EmbeddedDeadLetters as EmbeddedDeadLetters
from qdo.brokers.embedded.delayed import move_due
from qdo.brokers.embedded.reader import CHANGED
from qdo.brokers.embedded.requests import EmbeddedRequests
from qdo.brokers.embedded.schema import MESSAGES, Query
from qdo.brokers.embedded.writer import EmbeddedTables, Transaction, Writer
from qdo.encoding import ID, parsed
from qdo.positions import position_now, time_of_position
from qdo.system.fork_guard import unforked
from qdo.system.sqlite import ReplacedFileCheck, translated

MEMORY = ":memory:"
# Tolerance in units of 100 ns, because a Unix time as a float has an error of a few units.
_SLACK = 10
_DEADLINE = Query("SELECT min(deadline) FROM requests WHERE deadline > ? AND state < 3", "R")
_NEXT_DUE = Query("SELECT min(due) FROM delayed", "I")

# A locally administered MAC address, which no network card has.
ID_NODE = 0x02_00_00_00_00_01

_EMPTY = sqlite3.connect(MEMORY, check_same_thread=False)
_EMPTY.executescript(MESSAGES.schema)
"""A copy of it takes 0.4 ms, making the tables 1.4 ms."""

T = TypeVar("T")
Wake = Callable[[Iterable[str]], None]


class MemoryStore:
    """Holds the messages of one or more apps, for any number of `MemoryBroker` objects."""

    def __init__(self, clock: Callable[[], int] = position_now) -> None:
        self.clock = clock
        self.connection = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
        with unforked:
            _EMPTY.backup(self.connection)
        self.listeners: list[tuple[str, Wake]] = []  # the listeners of queues, with their apps
        self.takers: list[tuple[str, Callable[[], None]]] = []  # the listeners of requests
        self._seen = 0
        self._dice = random.Random(0)  # tests are reproducible

    def new_id(self) -> str:
        """Return an id for a message without a position.

        Every store returns the same sequence of ids.
        """
        return str(uuid.UUID(int=self._dice.getrandbits(128), version=4))

    def next_due(self) -> float | None:
        """Return the Unix time at which the next delayed message is due, or None."""
        with unforked:
            (due,) = _NEXT_DUE.only(self.connection)
        return None if due is None else time_of_position(due)

    def next_deadline(self) -> float | None:
        """Return the Unix time of the next deadline of a request, or None."""
        now = time_of_position(self.clock() + _SLACK)
        with unforked:
            (deadline,) = _DEADLINE.only(self.connection, (now,))
        return cast("float | None", deadline)

    def tick(self) -> None:
        """Move due messages into the queues of the apps that have listeners."""
        for app in dict.fromkeys(app for app, _ in self.listeners):
            self.move_due(MemoryWriter(self, app))

    def move_due(self, writer: MemoryWriter) -> None:
        while writer.run(lambda transaction: move_due(transaction, self.clock() + _SLACK)):
            pass

    def changed(self) -> list[tuple[str, str]]:
        found = CHANGED.all(self.connection, {"seen": self._seen})
        self._seen = found[-1][0] if found else self._seen
        return [(app, name) for _, app, name in found]


class MemoryTransaction(Transaction):
    """A transaction whose new ids are the same in every run."""

    def __init__(self, store: MemoryStore, app: str, max_queues: int | None) -> None:
        super().__init__(store.connection, app, store.clock, max_queues)
        self._store = store

    def new_id(self, message: Outgoing) -> str:
        own = (parsed(message.headers) or {}).get(ID)  # see `SendingBroker.send_within`
        return own or self._store.new_id()


class MemoryWriter:
    """Runs the changes of an app in the calling thread, each in a transaction."""

    def __init__(
        self, store: MemoryStore, app: str, limit: Callable[[], int | None] = lambda: None
    ) -> None:
        self.clock = store.clock
        self.store = store
        self.app = app
        self._limit = limit
        self._closed = False

    def run(self, work: Callable[[Transaction], T], size: int = 0) -> T:
        """Run a change, and then wake the listeners outside of the transaction."""
        if self._closed:
            raise UnusableBrokerError(reason="this broker is closed; open a new one to send")
        store = self.store
        with unforked, translated(MEMORY):
            transaction = MemoryTransaction(store, self.app, self._limit())
            store.connection.execute("BEGIN")
            try:
                result = work(transaction)
                transaction.flush()
            except BaseException:
                store.connection.execute("ROLLBACK")
                raise
            store.connection.execute("COMMIT")
            listeners = [*store.listeners] if transaction.rings else []
            changed = store.changed() if listeners else []
            takers = [*store.takers] if transaction.wakes_takers else []
        for app, wake in listeners:
            if names := [name for owner, name in changed if owner == app]:
                wake(names)
        for app, take in takers:
            if app == self.app:
                take()
        return result

    # The writer of a file has `call`, which groups the sends of several threads.
    call = run

    def close(self) -> None:
        self._closed = True


class _NoFile(ReplacedFileCheck):
    def check(self) -> None:
        """Do nothing, because other programs cannot replace a database in memory."""


_NO_FILE = _NoFile(MEMORY)


class MemoryBroker(SqliteBroker):
    """The queues of one app in a `MemoryStore`. Safe to use from several threads."""

    def __init__(self, store: MemoryStore, app: str) -> None:
        self.writer = MemoryWriter(store, app, lambda: self.max_queues)
        writer = cast(Writer, self.writer)
        super().__init__(EmbeddedTables(store.connection, MEMORY, app, writer, ID_NODE, _NO_FILE))
        self.requests = MemoryRequests(self)

    async def asend_many(self, messages: Sequence[Outgoing]) -> list[str]:
        return self.send_many(messages)  # a database in memory needs no wait for a commit

    def listen(self, wake: Wake) -> Callable[[], None]:
        store = self.writer.store
        store.move_due(self.writer)
        with unforked:
            store.changed()  # the listener must ignore earlier changes
        return _registered(store.listeners, (self.writer.app, wake))

    def close(self) -> None:
        self.writer.close()


class MemoryRequests(EmbeddedRequests):
    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker.tables, broker.checked_size)
        self._takers = broker.writer.store.takers

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        return _registered(self._takers, (self._tables.app, wake))


def _registered(listeners: list[T], listener: T) -> Callable[[], None]:
    listeners.append(listener)

    def stop() -> None:
        if listener in listeners:
            listeners.remove(listener)

    return stop
