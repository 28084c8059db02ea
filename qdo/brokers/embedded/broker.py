"""The embedded broker: a SQLite file that the processes of one machine share, and its queues.

A message is on disk when `send()` returns its id. Positions are UUIDv1 times of commits. In the
whole file, positions are unique and increase in the order of the commits.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from qdo.brokers.base import Outgoing
from qdo.brokers.catalog import NO_BACKLOG, Backlog, QueueCatalog
from qdo.brokers.embedded.dead_letters import EmbeddedDeadLetters
from qdo.brokers.embedded.delayed import DelayScheduler, EmbeddedDelayedMessages, send_with_options
from qdo.brokers.embedded.reader import CommitListener, EmbeddedReader
from qdo.brokers.embedded.requests import EmbeddedRequests
from qdo.brokers.embedded.schema import MESSAGES, Query
from qdo.brokers.embedded.streams import EmbeddedStreams
from qdo.brokers.embedded.writer import KEEP_HEAD, EmbeddedTables, Transaction, Work, Writer
from qdo.brokers.grouped_calls import GroupCommitBroker
from qdo.brokers.outgoing import checked_size
from qdo.brokers.streams import check_deletable
from qdo.errors import QueueNotEmptyError
from qdo.positions import format_position, position_now, position_of_time
from qdo.queues import check_queue_name
from qdo.system.fork_guard import unforked
from qdo.system.sqlite import ReplacedFileCheck, open_database, translated

# The maximum number of queues in one query, because a fork waits for the end of the query.
MAX_QUEUES = 1000

_ALL_NAMES = Query("SELECT name FROM queues WHERE app = :app ORDER BY name", "t")
_NAMES = Query(
    "SELECT name FROM queues WHERE app = :app"
    " AND name NOT IN (SELECT queue FROM streams WHERE app = :app AND hidden) ORDER BY name",
    "t",
)
_BACKLOGS = Query(
    """
SELECT queues.name, queues.head, queues.sent, queues.delayed, first.position, first.number
FROM json_each(:after) AS asked
CROSS JOIN queues ON queues.app = :app AND queues.name = asked.key
LEFT JOIN messages AS first ON first.queue = queues.id AND first.position = (
    SELECT position FROM messages
    WHERE queue = queues.id AND position > asked.value ORDER BY position LIMIT 1)
""",
    "tiiiII",
)
_FIND = Query("SELECT id, head, delayed FROM queues WHERE app = ? AND name = ?", "iii")
_WAITING = Query("SELECT count(*) FROM messages WHERE queue = ? AND position > ?", "i")
_DEAD = Query("SELECT count(*) FROM dead_letters WHERE queue = ?", "i")
_DELETE = (
    "DELETE FROM messages WHERE queue = ?",
    "DELETE FROM delayed WHERE queue = ?",
    "DELETE FROM dedup WHERE queue = (SELECT id FROM queues WHERE id = ? AND root IS NULL)",
    "DELETE FROM dead_letters WHERE queue = ?",
    "DELETE FROM queues WHERE id = ?",
)
log = logging.getLogger(__name__)
# The number of messages that one transaction deletes; this delays other writers by some
# milliseconds.
RETIRE_CHUNK = 1000
# If done messages are dated further ahead of the clock, the broker warns that it cannot delete
# them.
AHEAD_SECONDS = 3600.0
_NODE = Query("SELECT node FROM file", "i")
_RETIRE = """
DELETE FROM messages
WHERE queue = (SELECT id FROM queues WHERE app = :app AND name = :queue) AND position IN (
    SELECT position FROM messages
    WHERE queue = (SELECT id FROM queues WHERE app = :app AND name = :queue) AND position <= :upto
    ORDER BY position LIMIT :chunk)
"""


class EmbeddedCatalog(QueueCatalog):
    """The queues of one app in a file. Safe to use from several threads."""

    def __init__(self, tables: EmbeddedTables) -> None:
        self._tables = tables

    def names(self) -> list[str]:
        return [name for (name,) in self._tables.read(_NAMES)]

    def names_to_show(self) -> list[str]:
        return [name for (name,) in self._tables.read(_ALL_NAMES)]

    def backlog(self, queue: str, after: int) -> Backlog:
        return self.backlogs({queue: after})[queue]

    def backlogs(self, after: Mapping[str, int]) -> dict[str, Backlog]:
        backlogs = dict.fromkeys(after, NO_BACKLOG)
        asked = list(after.items())
        for start in range(0, len(asked), MAX_QUEUES):
            part = json.dumps(dict(asked[start : start + MAX_QUEUES]))
            rows = self._tables.read(_BACKLOGS, after=part)
            for queue, head, sent, delayed, oldest, number in rows:
                count = 0 if oldest is None else sent - number + 1
                backlogs[queue] = Backlog(count=count, oldest=oldest, head=head, delayed=delayed)
        return backlogs


def check_empty(transaction: Transaction, queue: str, last: int) -> None:
    connection = transaction.connection
    found = _FIND.first(connection, (transaction.app, queue))
    if found is None:
        return
    number, _, delayed = found
    (waiting,) = _WAITING.only(connection, (number, last))
    (dead,) = _DEAD.only(connection, (number,))
    if waiting or delayed or dead:
        raise QueueNotEmptyError(queue=queue, waiting=waiting, delayed=delayed, dead_letters=dead)


def delete(transaction: Transaction, queue: str, last: int) -> None:
    """Delete a queue, if it exists; see `Broker.delete_queue`."""
    check_empty(transaction, queue, last)
    execute = transaction.connection.execute
    found = _FIND.first(transaction.connection, (transaction.app, queue))
    if found is None:
        return
    number, head, _ = found
    execute(KEEP_HEAD, (head,))
    for statement in _DELETE:
        execute(statement, (number,))


class SqliteBroker(GroupCommitBroker):
    """Queues of one app in the tables of a SQLite database."""

    requests: EmbeddedRequests
    _writer: Writer

    def __init__(self, tables: EmbeddedTables) -> None:
        self.tables = tables
        self._writer = tables.writer
        self.id_node = tables.node
        self._logged_ahead = False
        self.checked_size = partial(checked_size, set())
        self.catalog = EmbeddedCatalog(tables)
        self.delayed = EmbeddedDelayedMessages(tables)
        self.dead_letters = EmbeddedDeadLetters(tables)
        self.streams = EmbeddedStreams(tables)
        self.stream_of = self.streams.stream_of
        self.requests = EmbeddedRequests(tables, self.checked_size)

    def _append(self, messages: Sequence[Outgoing]) -> Work:
        return lambda transaction: transaction.append(messages)

    def _send(self, messages: Sequence[Outgoing]) -> Work:
        return lambda transaction: send_with_options(transaction, messages, self.id_node)

    def reader(self, queue: str, after: int) -> EmbeddedReader:
        return EmbeddedReader(self.tables, check_queue_name(queue), after)

    def trim(self, queue: str, last: int, older_than: float) -> int:
        now = time.time()
        upto = min(last, position_of_time(now - older_than))
        oldest = self.catalog.backlog(queue, 0).oldest
        if oldest is None or oldest > upto:
            if oldest is not None and position_of_time(now + AHEAD_SECONDS) < oldest <= last:
                self._log_ahead(oldest)
            return 0  # without the write lock, because most calls delete no messages
        total = 0
        while True:
            deleted = self._writer.run(lambda transaction: _retire(transaction, queue, upto))
            total += deleted
            if deleted < RETIRE_CHUNK:
                return total

    def delete_queue(self, queue: str, last: int) -> None:
        # Check outside the transaction, because a deletable shard stays deletable.
        check_deletable(queue, self.streams)
        self._writer.run(lambda transaction: check_empty(transaction, queue, last))
        while self._writer.run(lambda transaction: _retire(transaction, queue, last)):
            pass  # delete in parts, like `trim`
        self._writer.run(lambda transaction: delete(transaction, queue, last))

    def _log_ahead(self, position: int) -> None:
        if not self._logged_ahead:
            self._logged_ahead = True
            log.warning(
                "%s: messages are dated %s and later, because the clock of this machine was ahead"
                " when some were sent, or is behind now; they are not deleted before that time,"
                " although they are done",
                self.tables.path,
                format_position(position),
            )


def _retire(transaction: Transaction, queue: str, upto: int) -> int:
    parameters = {"app": transaction.app, "queue": queue, "upto": upto, "chunk": RETIRE_CHUNK}
    return transaction.connection.execute(_RETIRE, parameters).rowcount


class EmbeddedBroker(SqliteBroker):
    """Queues of one app in a SQLite file.

    Safe to use from several threads, or from greenlets once gevent has patched the process.
    """

    def __init__(self, path: str, app: str, clock: Callable[[], int] = position_now) -> None:
        self._wakeups = f"{path}.wakeups"
        self._clock = clock
        self._stops: list[Callable[[], None]] = []
        with unforked:  # before the writer exists, the file has no guard against forks
            reading = open_database(path, MESSAGES)
            try:
                with translated(path):
                    (node,) = _NODE.only(reading)
                watch = ReplacedFileCheck(path)
                writer = Writer(path, app, self._wakeups, clock, limit=lambda: self.max_queues)
                super().__init__(EmbeddedTables(reading, path, app, writer, node, watch))
            except BaseException:
                reading.close()
                raise
        self.identity = f"{node:012x}"

    @property
    def waiting(self) -> int:
        """The number of this process's calls that wait for their commit."""
        return self._writer.waiting

    def listen(self, wake: Callable[[Iterable[str]], None]) -> Callable[[], None]:
        delays = DelayScheduler(self.tables, self._clock)
        while delays.step() == 0:
            pass  # move all due messages before returning, also for burst mode
        with translated(self.tables.path):
            listener = CommitListener(self.tables, self._wakeups, wake, delays.step)
        self._stops.append(listener.stop)
        return listener.stop

    def close(self) -> None:
        for stop in (*self._stops, *self.requests.stops):
            stop()
        with unforked:
            self.tables.reading.close()
        self._writer.close()  # close this last, because it releases the file's guard
