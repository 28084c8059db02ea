"""Interleaved transactions of several sessions, with a reader and a listener that look after each
step.

A schedule is a sequence of steps: a session and what it does. A session that waits for a lock does
its further steps later, so every schedule ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from qdo.brokers.postgresql.listener import LookBound
from tests.support.processes import wait_until

APP = "app"
Step = tuple[int, str]
"""Number of the session, and what it does.

``begin LEVEL``, ``commit``, ``rollback``, ``savepoint``, ``back`` (to the last savepoint), ``now``
(all constraints immediate), and ``stage``, ``append``, ``send`` or ``large`` with a queue.
"""
LEVELS = {"rc": "READ COMMITTED", "rr": "REPEATABLE READ", "s": "SERIALIZABLE"}
_STATEMENTS = {
    "append": "SELECT qdo.append(%s, ARRAY[%s], NULL, NULL, ARRAY[%s::bytea], NULL)",
    "send": "SELECT qdo.send(%s, ARRAY[%s], NULL, NULL, ARRAY[%s::bytea], NULL, NULL, NULL, NULL,"
    " NULL)",
    "stage": "SELECT qdo.stage((SELECT node FROM qdo.about), %s, ARRAY[%s], NULL, NULL,"
    " ARRAY[%s::bytea], ARRAY['id'], NULL, NULL, NULL)",
}
_STATEMENTS["large"] = _STATEMENTS["append"]
"""A body that changes the row of its queue."""
_WAITING = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND pid = ANY (%s)"
_LOOK = "SELECT next_xid, running, names FROM qdo.look(%s, %s, %s::bigint[], %s)"
_MARK = "SELECT pg_current_xact_id()::text, last_value FROM qdo.positions"
_READ = """
SELECT position, convert_from(substring(body FROM 1 FOR 12), 'UTF8') FROM qdo.messages
WHERE queue = (SELECT id FROM qdo.queues WHERE app = %s AND name = %s) AND position > %s
ORDER BY position
"""
LARGE = b" " * 5000
SOON_SECONDS = 0.005
"""Most statements have ended by then."""
_REFUSED = (
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.InFailedSqlTransaction,
    errors.InvalidSavepointSpecification,
)
"""What a transaction may be told in some order of steps."""


_BOUNDARIES = ("begin", "commit", "rollback", "savepoint", "back", "now")


class OrderError(Exception):
    """A reader or a listener missed something."""


@dataclass
class ScheduleSession:
    """One connection, whose statements run on a thread of its own.

    :ivar open: messages of the running transaction by savepoint.
    :ivar committed: messages as (how, queue, text), one list for each transaction.
    """

    connection: psycopg.Connection[Any]
    open: list[list[tuple[str, str, str]]] = field(default_factory=list)
    committed: list[list[tuple[str, str, str]]] = field(default_factory=list)
    running: Future[None] | None = None

    def do(self, action: str, text: str, prefix: str) -> None:
        """Run one step; PostgreSQL may refuse it."""
        word, _, argument = action.partition(" ")
        idle = self.connection.info.transaction_status == TransactionStatus.IDLE
        if idle != (word == "begin") and word in _BOUNDARIES:
            return  # it means nothing here
        try:
            self._do(word, argument, text, prefix)
        except _REFUSED:
            return  # the transaction has failed: its commit is a rollback

    def _do(self, word: str, argument: str, text: str, prefix: str) -> None:
        execute = self.connection.execute
        if word == "begin":
            execute(f"BEGIN ISOLATION LEVEL {LEVELS[argument]}")
            self.open = [[]]
            execute("SELECT 1")  # takes the snapshot
        elif word == "commit":
            messages, self.open = self.open, []
            if execute("COMMIT").statusmessage == "COMMIT":
                self.committed.append(list(itertools.chain(*messages)))
        elif word == "rollback":
            self.open = []
            execute("ROLLBACK")
        elif word == "savepoint":
            execute("SAVEPOINT here")
            self.open.append([])
        elif word == "back":
            execute("ROLLBACK TO here")
            self.open[-1] = []
        elif word == "now":
            execute("SET CONSTRAINTS ALL IMMEDIATE")
        else:
            body = text.encode() + (LARGE if word == "large" else b"")
            execute(_STATEMENTS[word], (APP, prefix + argument, body))
            if self.open:
                self.open[-1].append((word, prefix + argument, text))
            else:
                self.committed.append([(word, prefix + argument, text)])


class Interleaver:
    """Sessions on one database, and the observers.

    :ivar observer: sees what a reader and a listener see.
    """

    def __init__(self, conninfo: str, sessions: int) -> None:
        self._conninfo = conninfo
        self.observer = psycopg.connect(conninfo, autocommit=True)
        self._pools = [ThreadPoolExecutor(1) for _ in range(sessions)]
        self._connections = [psycopg.connect(conninfo, autocommit=True) for _ in self._pools]
        for connection in self._connections:
            connection.execute("SET deadlock_timeout = '5ms'")
        self._runs = 0

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()
        for connection in (*self._connections, self.observer):
            connection.close()

    def run(self, steps: Sequence[Step], queues: str) -> None:
        """Run a schedule on new queues; sessions that are still in a transaction commit.

        :param queues: their names, one letter each; a capital: the queue exists before.
        :raises OrderError: the reader or the listener missed something.
        """
        self._runs += 1
        prefix = f"{self._runs}-"
        for letter in filter(str.isupper, queues):
            names = [prefix + letter]
            self.observer.execute("SELECT qdo.lock_queues(%s, %s, NULL)", (APP, names))
        sessions = [ScheduleSession(connection) for connection in self._connections]
        watch = StepObserver(self.observer, [prefix + letter for letter in queues])
        ends = [(number, "commit") for number in range(len(sessions))]
        for place, (number, action) in enumerate((*steps, *ends)):
            session = sessions[number]
            session.running = self._pools[number].submit(session.do, action, str(place), prefix)
            wait([session.running], SOON_SECONDS)
            self._settle(sessions)
            watch.look()
        for session in sessions:  # one that waited ends once the others have committed
            if session.running is not None:
                session.running.result()
        watch.look()
        committed = [each for session in sessions for each in session.committed]
        watch.check(committed)

    def _settle(self, sessions: Sequence[ScheduleSession]) -> None:
        """Wait until each session has ended its statement or waits for another."""

        def settled() -> bool:
            busy = [
                session.connection.info.backend_pid
                for session in sessions
                if session.running is not None and not session.running.done()
            ]
            if not busy:
                for session in sessions:
                    if session.running is not None:
                        session.running.result()
                return True
            waiting = self.observer.execute(_WAITING, (busy,)).fetchone()
            return waiting == (len(busy),)

        wait_until(settled, "the sessions have ended their statements, or wait for a lock")


class StepObserver:
    """A reader and a listener, after every step."""

    def __init__(self, observer: psycopg.Connection[Any], queues: Sequence[str]) -> None:
        self._observer = observer
        self._after = dict.fromkeys(queues, 0)
        self._read: dict[str, list[str]] = {queue: [] for queue in queues}
        self._seen: set[tuple[str, int]] = set()
        self._snapshot: tuple[int, list[int]] = (2**62, [])
        self._bound = LookBound()
        self._last = 0
        self.look()

    def look(self) -> None:
        """Read on, and compare what the listener finds with what has become visible."""
        ((xid, last),) = self._observer.execute(_MARK)
        self._bound.mark(int(xid), self._last)
        self._last = last
        # One snapshot: PostgreSQL may end a deadlock, and with it a wait, between two statements.
        with self._observer.transaction():
            self._observer.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self._compare()

    def _compare(self) -> None:
        seen = (APP, *self._snapshot, self._bound.since)
        *snapshot, names = self._observer.execute(_LOOK, seen).fetchone() or ()
        self._snapshot = (snapshot[0], snapshot[1])
        self._bound.looked(*self._snapshot)
        changed = set()
        for queue, after in self._after.items():
            found = self._observer.execute(_READ, (APP, queue, 0)).fetchall()
            new = [each for each in found if (queue, each[0]) not in self._seen]
            self._seen.update((queue, position) for position, _ in new)
            if new:
                changed.add(queue)
            for position, text in new:
                if position < after:
                    raise OrderError(f"a reader of {queue} that is at {after} misses {position}")
                self._read[queue].append(text.strip())
                self._after[queue] = position
        if set(names) != changed:
            raise OrderError(f"the listener found {names}, and {changed} have changed")

    def check(self, transactions: Sequence[Sequence[tuple[str, str, str]]]) -> None:
        """Compare what was read with what was committed."""
        for queue, read in self._read.items():
            sent = [text for each in transactions for _, name, text in each if name == queue]
            if sorted(read) != sorted(sent):
                raise OrderError(f"{queue}: read {read}, committed {sent}")
            for each in transactions:
                staged = [text for how, name, text in each if (how, name) == ("stage", queue)]
                if [text for text in read if text in staged] != staged:
                    raise OrderError(f"{queue}: read {read}, staged in the order {staged}")
        left = self._observer.execute("SELECT count(*) FROM qdo.outgoing").fetchone()
        if left != (0,):
            raise OrderError(f"{left} messages are left in outgoing")


def interleaved(programs: Sequence[Sequence[str]]) -> Iterator[list[Step]]:
    """Yield the schedules in which each session does its steps in their order."""
    numbers = [number for number, program in enumerate(programs) for _ in program]
    for order in sorted(set(itertools.permutations(numbers))):
        rests = [iter(program) for program in programs]
        yield [(number, next(rests[number])) for number in order]
