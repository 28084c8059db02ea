"""Wake a worker when its queues receive messages.

A notification names queues, or only reports that a sender has sent messages. The function `look`
returns the queues that changed since the listener's last look. So the listener misses no message if
a notification is lost. For example, a sender may die between its commit and its notification, and a
pooler in transaction mode delivers no notifications. If earlier looks have returned all named
queues, the listener skips the look, which takes as long as fetching the message. The listener does
not trust other names, because every role may notify.

Listeners of requests share the connection. A notification of requests or a new connection wakes
these listeners. Then these listeners look for requests.

Looks compare the ids of transactions. After a crash or a failover, the server may assign ids again
that a look has already seen. Therefore the listener wakes all queues once after each new connection
or start of the server. A pooler keeps its connection while the server recovers from the crash of a
server process. The listener recognizes such a recovery by the reset of the server's statistics.
After a failover, the standby may lack transactions that the lost primary had committed. Then both
the last position and the end of the log are lower than in an earlier look. The listener reports the
loss, and makes new positions follow the positions that workers may have recorded.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import psycopg
from psycopg import errors

from qdo.brokers.postgresql.writer import REQUESTS
from qdo.errors import FailureKind, QdoError
from qdo.positions import format_position
from qdo.postgresql.session import PostgresqlConnection, PostgresqlSession, loop_poll
from qdo.postgresql.url import SchemaAddress, connection_name
from qdo.refusals import failure_kind
from qdo.system.clock import clock
from qdo.system.logs import RetryLog
from qdo.system.native import guarded
from qdo.text import printable

log = logging.getLogger(__name__)

# The time between looks without a notification.
LOOK_SECONDS = 1.0
# The time between looks through a pooler, which delivers no notifications.
POLL_SECONDS = 0.1
# A longer look means that the server was away. Clients wait 2 s or more for a connection.
SLOW_SECONDS = 1.0
# The payload of a notification by an app's transaction. Other transactions that committed at the
# same time did not notify, and may become visible only after the next look.
AGAIN = "again"
# The delays of further looks after a notification with the payload `AGAIN`.
AGAIN_SECONDS = (0.02, 0.25)
# The number of queue names that a listener remembers, at about 100 bytes each.
KNOWN_NAMES = 100_000
RETRY_SECONDS = 1.0
# The time between two attempts to move messages of locked queues. Each attempt waits for a lock for
# the same time.
LOCKED_SECONDS = 0.2
# If messages are late by this time, the listener reports the locks that delay them.
LATE_SECONDS = 5.0
# The limits of one transaction that moves due messages and so locks their queues.
MOVE_MESSAGES = 1000
MOVE_BYTES = 8 * 1024 * 1024
# The maximum duration of this transaction. Meanwhile, other messages and a starting worker wait.
MOVE_SECONDS = 10.0
# The time between two marks (see `LookBound`), because each mark uses a transaction id. Also the
# time between two chores of a worker (see `tidy` in `functions.sql`).
MARK_SECONDS = 60.0
# A value that neither transaction ids nor positions ever reach.
NOTHING_NEW = 2**62
_SECOND = 10_000_000
_LOOK = """
SELECT look.*, concat(pg_postmaster_start_time(), stats_reset)
FROM {schema}.look(%s, %s, %s::bigint[], %s), pg_stat_wal
"""


def _warn(notice: errors.Diagnostic) -> None:
    if notice.sqlstate == "QD008":
        log.warning("%s", printable(notice.message_primary or ""))


class LookBound:
    """The position after which the next look must search for new messages."""

    # A transaction takes its id before its positions. So a transaction with the id of a mark, or a
    # higher id, takes positions after the mark's `last`. Once all earlier transactions have ended,
    # only positions after `last` can be new. A snapshot cannot serve as a mark, because
    # transactions with higher ids may already be in progress.

    def __init__(self) -> None:
        self.since = 0
        self._mark: tuple[int, int] | None = None

    def mark(self, xid: int, last: int) -> None:
        """Record a transaction id that the server assigned when `last` was the last position."""
        self._mark = self._mark or (xid, last)

    def looked(self, next_xid: int, running: Sequence[int]) -> None:
        if self._mark is not None and min(running, default=next_xid) >= self._mark[0]:
            self.since = self._mark[1]
            self._mark = None


class Answers:
    """The times at which the server was away, by `qdo.system.clock`."""

    def __init__(self) -> None:
        self._away_at = -math.inf
        self._asked_at = math.inf

    def asked(self) -> None:
        self._asked_at = clock()

    def answered(self) -> None:
        if self._is_slow():
            self.failed()
        self._asked_at = math.inf

    def failed(self) -> None:
        self._away_at = clock()
        self._asked_at = math.inf

    def were_missing(self, since: float) -> bool:
        """Return whether the server was away at any time after `since`."""
        return self._away_at >= since or self._is_slow()

    def _is_slow(self) -> bool:
        return clock() - self._asked_at > SLOW_SECONDS


class NotificationListener:
    """Waits for notifications and due messages on a thread (a greenlet under gevent).

    :param wake: a function that the listener calls with the names of queues with new messages.
        If None, listen only for requests.
    :param check: a function of each new connection, which raises an error for an unusable schema.
    """

    def __init__(
        self,
        address: SchemaAddress,
        app: str,
        wake: Callable[[Iterable[str]], None] | None,
        check: Callable[[PostgresqlConnection], None],
    ) -> None:
        self._app = app
        self._address = address
        self._wake = wake
        self._check = check
        self._request_wakes: list[Callable[[], None]] = []
        self._told_of_requests = False
        self._waking = threading.RLock()  # no callback runs after `stop`
        schema = address.schema
        self._look_statement = _LOOK.format(schema=schema)
        self._names_statement = f"SELECT name FROM {schema}.queues WHERE app = %s LIMIT %s"  # noqa: S608 - the address allows a-z, 0-9 and _
        self._move_statement = f"SELECT {schema}.move_due(%s, %s, %s)"
        self._tidy_statement = f"SELECT * FROM {schema}.tidy(%s)"  # noqa: S608 - the address allows a-z, 0-9 and _
        self._advance_statement = f"SELECT {schema}.advance(%s)"
        self._channel_statement = f"SELECT {schema}.channel(%s)"
        self._notify_statement = f"SELECT pg_notify({schema}.channel(%s), '')"
        name = connection_name(app, "listener")
        self._session = PostgresqlSession(address, self._prepare, loop_poll, name=name)
        self._next_xid = NOTHING_NEW
        self._bound = LookBound()
        self._marked = self._tidied = 0.0
        self._running: list[int] = []
        self._server_start: str | None = None
        self._last_position = self._log_end = 0
        self._reconnected = False
        self._noticed = False
        self._again: list[float] = []
        self._known: set[str] = set()
        self._named: set[str] = set()
        self._retries = RetryLog(log, f"database {address.server}")
        self._told_of_locks = False
        self._elsewhere = False  # another listener moves due messages
        self._stopping = False
        self.answers = Answers()
        self._pause = self._begin()
        self._closed = False
        self._closing = threading.Lock()  # `stop` must not write to a closed pipe
        self._pipe = os.pipe()
        self._thread = threading.Thread(
            target=guarded("doorbell", self._run), name="qdo-doorbell", daemon=True
        )
        self._thread.start()

    def _begin(self) -> float:
        """Look for the first time, so that due messages are readable; return the next pause."""
        try:
            pause = self._step()
            deadline = time.monotonic() + LOOK_SECONDS
            while self._elsewhere and time.monotonic() < deadline:
                time.sleep(AGAIN_SECONDS[0])
                pause = self._step()
        except BaseException:
            self._session.close()
            raise
        return pause

    def stop(self) -> None:
        """Stop listening for messages; make no further call of `wake`. Idempotent."""
        # The connection stays open while callers listen for requests.
        with self._waking:
            self._wake = None
        self._end_unless_used()

    def listen_for_requests(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        """Call `wake` when requests change; return a function to stop this, or None if stopped."""
        own = partial(wake)  # a distinct object for each call
        with self._closing:
            if self._stopping:
                return None
            self._request_wakes.append(own)
        return partial(self._forget, own)

    def close(self) -> None:
        """Stop listening for messages and requests. Idempotent."""
        with self._waking:
            self._request_wakes.clear()
        self.stop()

    def _forget(self, wake: Callable[[], None]) -> None:
        with self._waking:
            if wake in self._request_wakes:
                self._request_wakes.remove(wake)
        self._end_unless_used()

    def _end_unless_used(self) -> None:
        with self._closing:
            if self._wake is not None or self._request_wakes:
                return
            self._stopping = True
            if not self._closed:
                os.write(self._pipe[1], b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- on the listening thread ------------------------------------------------------

    def _prepare(self, connection: PostgresqlConnection) -> None:
        self._check(connection)
        self._reconnected = True
        if self._server_start is not None:
            self.answers.failed()
        self._tidy_since = 0
        # If a notification arrives during a statement, the server sends it with the result.
        connection.add_notify_handler(self._notice)
        connection.add_notice_handler(_warn)
        if not self._address.pooled:
            (channel,) = connection.execute(self._channel_statement, (self._app,)).fetchone() or (
                "",
            )
            connection.execute(f'LISTEN "{channel}"')

    def _notice(self, notification: psycopg.Notify) -> None:
        if self._needs_look(notification.payload):
            self._noticed = True

    def _needs_look(self, payload: str) -> bool:
        """Record the queues in a notification; return whether a look is necessary."""
        names = payload.split("/")[1:]
        if names[:1] == [REQUESTS]:
            self._told_of_requests = True
            del names[0]
            if not names:
                return False
        if names and self._known.issuperset(names):
            self._named.update(names)
            return False
        if payload == AGAIN:
            self._told_of_requests = True
            now = time.monotonic()
            self._again = [now + seconds for seconds in AGAIN_SECONDS]
        return True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait(self._pause)
                if not self._stopping:
                    self._pause = self._step_or_warn()
        finally:
            with self._closing:
                self._closed = True
                for end in self._pipe:
                    os.close(end)
            self._session.close()

    def _step_or_warn(self) -> float:
        try:
            pause = self._step()
        except QdoError as error:
            if failure_kind(error) is FailureKind.UNREACHABLE:
                self.answers.failed()
            self._retries.failed(error, RETRY_SECONDS)
            return RETRY_SECONDS
        self._retries.succeeded()
        return pause

    def _step(self) -> float:
        """Move due messages and wake changed queues; return the seconds to wait."""
        self._elsewhere = False
        pauses = [POLL_SECONDS if self._address.pooled else LOOK_SECONDS]
        while (due := self._session.run(self._look)) is not None and due <= 0:
            try:
                moved = self._session.run(self._move)
            except QdoError as error:
                # A lock also must not stop a starting worker, which has other messages.
                if failure_kind(error) is FailureKind.UNREACHABLE:
                    raise
                self._tell_of_locks(error, -due / _SECOND)
                pauses.append(LOCKED_SECONDS)
                break
            self._elsewhere = moved is None
            if not moved:
                break  # the listener that moves messages notifies others
        else:
            self._told_of_locks = False
            pauses += [] if due is None else [due / _SECOND]
        now = time.monotonic()
        later = [each for each in self._again if each > now]
        self._told_of_requests |= self._address.pooled or len(later) < len(self._again)
        self._again = later
        pauses += [each - now for each in self._again[:1]]
        return min(pauses)

    def _look(self, connection: PostgresqlConnection) -> int | None:
        """Wake the queues that changed; return the ticks until the next message is due."""
        self._noticed = False
        first = self._server_start is None
        since = NOTHING_NEW if first else self._bound.since
        seen = (self._app, self._next_xid, self._running, since)
        if first and (found := connection.execute(self._look_statement, seen).fetchone()):
            self._last_position = found[4]
        now = time.monotonic()
        if first or now - self._marked > MARK_SECONDS:
            self._marked = now
            (xid,) = connection.execute("SELECT pg_current_xact_id()::text").fetchone() or (0,)
            self._bound.mark(int(xid), self._last_position)
        if first or now - self._tidied > MARK_SECONDS:
            tidy = connection.execute(self._tidy_statement, (self._tidy_since,)).fetchone()
            self._tidy_since, is_rest = tidy or (0, False)
            self._tidied = 0.0 if is_rest else now
        self.answers.asked()
        found = connection.execute(self._look_statement, seen).fetchone()
        self.answers.answered()
        if found is None:
            return None
        next_xid, running, names, due, last, log_end, server_start = found
        if last < self._last_position and log_end < self._log_end:
            self._report_loss(connection, last)
        if self._reconnected or server_start != self._server_start:
            if not first:  # transaction ids may have restarted
                self._bound = LookBound()
                self._marked = 0.0
            limit = KNOWN_NAMES if first else None
            all_names = connection.execute(self._names_statement, (self._app, limit))
            names = [name for (name,) in all_names]
            self._told_of_requests = True
        # Set these values last, because after an error the next look must find the same queues.
        self._next_xid = next_xid
        self._running = running
        self._server_start = server_start
        self._last_position = last
        self._log_end = log_end
        self._bound.looked(next_xid, running)
        self._reconnected = False
        self._remember(names)
        if not first:  # on the first look, the caller reads all queues
            self._wake_queues(names)
        return None if due is None else int(due)

    def _remember(self, names: Iterable[str]) -> None:
        if len(self._known) > KNOWN_NAMES:
            self._known.clear()
        self._known.update(itertools.islice(names, KNOWN_NAMES))

    def _report_loss(self, connection: PostgresqlConnection, last: int) -> None:
        log.error(
            "%s lacks transactions that were committed, as after a failover to a standby that was"
            " behind: its last position is %s, and %s was in use. Messages between them are lost"
            " if they were not processed before; the queues continue with those sent from now on."
            " Send the lost ones again",
            self._address.server,
            format_position(last),
            format_position(self._last_position),
        )
        connection.execute(self._advance_statement, (self._last_position,))

    def _move(self, connection: PostgresqlConnection) -> int | None:
        """Move due messages and notify; return their number, None if another listener moves."""
        limits = (self._app, MOVE_MESSAGES, MOVE_BYTES)
        with connection.transaction():  # also needed with a pooler
            connection.execute(f"SET LOCAL statement_timeout = {round(MOVE_SECONDS * 1000)}")
            (moved,) = connection.execute(self._move_statement, limits).fetchone() or (None,)
        if moved:
            connection.execute(self._notify_statement, (self._app,))
        return None if moved is None else int(moved)

    def _tell_of_locks(self, error: QdoError, late_seconds: float) -> None:
        """Warn once if due messages stay late; do not warn about a usual short wait."""
        if late_seconds > LATE_SECONDS and not self._told_of_locks:
            self._told_of_locks = True
            log.warning(
                "delayed messages are %.0f s late: %s; retrying every %g s, and moving those of"
                " other queues meanwhile",
                late_seconds,
                error,
                LOCKED_SECONDS,
            )

    def _wait(self, seconds: float) -> None:
        """Wait until a notification requires a look, the listener ends, or the time has passed."""
        self._wake_named()
        if self._noticed:
            return
        poll = loop_poll()
        poll.register(self._pipe[0], select.POLLIN)
        connection = self._session.connection
        if connection is None or connection.closed:
            poll.poll(min(seconds, RETRY_SECONDS) * 1000)
            return
        poll.register(connection.pgconn.socket, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not self._stopping:
            # Round up, because after a wait that is too short, no message would be due.
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
                return
            try:
                connection.pgconn.consume_input()
            except Exception:  # noqa: BLE001 - psycopg's errors of a lost connection
                self.answers.failed()
                self._session.close()
                return
            needed = False
            while (found := connection.pgconn.notifies()) is not None:
                needed |= self._needs_look(found.extra.decode(errors="replace"))
            self._wake_named()
            if needed:
                return

    def _wake_named(self) -> None:
        """Wake the queues and requests that notifications have named since the last call."""
        names = self._named
        self._named = set()
        self._wake_queues(names)
        if self._told_of_requests:
            self._told_of_requests = False
            for wake in list(self._request_wakes):
                with self._waking:
                    if wake in self._request_wakes:
                        wake()

    def _wake_queues(self, names: Collection[str]) -> None:
        with self._waking:
            if names and self._wake is not None:
                self._wake(names)
