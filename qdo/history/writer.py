"""Writes and shortens the history of one process, on a native thread, at most once a second.

============================  =================================================================
what happens                  consequence
============================  =================================================================
the answer to a commit is     the same rows are written again, which changes nothing
lost
the database is away, slow,   rows are kept, at most 10,000 of each table, and 100,000 of
locked, read-only or full     owners; the attempts of further ones are counted and dropped.
                              Messages do not wait
the file is removed or        rows are written to the file that is there now, or to a new one
replaced
the process is killed         what it counted in its last second is lost
the process starts again      it is another worker of the tables: no row is written by two
============================  =================================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty
from typing import TYPE_CHECKING, Any

from qdo.errors import DatabaseReplacedError
from qdo.history.address import open_engine
from qdo.history.recorder import (
    BUSY,
    DEAD_LETTERED,
    FAILED,
    FIRST_BUCKET,
    MAX_KEPT,
    RETRIED,
    SIZE,
    Counts,
    OwnerRow,
    RecordedAction,
    RecordedRun,
    Recorder,
)
from qdo.system.files import sqlite_path
from qdo.system.fork_guard import ForkGuard, unforked
from qdo.system.native import inbox, start_thread
from qdo.system.sqlite import ReplacedFileCheck
from qdo.text import describe, hide_credentials, printable

if TYPE_CHECKING:
    from sqlalchemy import Connection

_log = logging.getLogger(__name__)

# The name of a queue, and the Unix time at which a minute begins.
Key = tuple[str, int]
_NOTHING: tuple[float, ...] = (0.0,) * SIZE
# Time without attempts after which the writer forgets a queue until its next attempt.
IDLE_SECONDS = 600.0
WRITE_SECONDS = 1.0
# Maximum share of a processor for the thread. With many queues, the thread writes less often.
WRITE_SHARE = 0.05
# Age at which the writer deletes rows. Rows of operators' changes are few, so they stay longer.
RETENTION_SECONDS = 30 * 86_400.0
ACTION_RETENTION_SECONDS = 365 * 86_400.0
# Maximum number of owner rows in one write. More rows would block the event loop for longer,
# because the thread holds Python's lock.
OWNERS_AT_ONCE = 2000
_DELETE_SECONDS = 3600.0
# Maximum time for which an ending process waits for the last write.
_CLOSE_SECONDS = 3.0


def attempts_in(counts: Iterable[float]) -> int:
    row = tuple(counts)
    return int(row[FAILED] + sum(row[FIRST_BUCKET:]))


@dataclass(slots=True)
class MinuteTotals:
    """The totals of a queue in one minute. `stored` has the totals in the database."""

    counts: Counts = field(default_factory=lambda: [0.0] * SIZE)
    stored: tuple[float, ...] = _NOTHING


@dataclass(slots=True)
class _Seen:
    """The counts of a queue that the minutes already include."""

    source: Counts
    counts: tuple[float, ...] = _NOTHING
    changed: float = 0.0


class Minutes:
    """The minutes that one process writes. This class is not thread-safe.

    Rows contain totals, so writing a row again changes nothing. An attempt belongs to the minute in
    which `collect` first sees the attempt.

    :ivar dropped: number of attempts in dropped minutes.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._totals: dict[Key, MinuteTotals] = {}
        self._unstored: dict[Key, None] = {}
        self._seen: dict[str, _Seen] = {}
        self._removed: list[tuple[str, _Seen]] = []

    def __len__(self) -> int:
        return len(self._unstored)

    def collect(self, counts: dict[str, Counts], now: float) -> None:
        """Add the counts since the last call to the minute of the Unix time `now`.

        Remove idle queues.
        """
        minute = int(now) // 60 * 60
        # This writer removed the queue a second ago, but the event loop may still have used the
        # list.
        removed = self._removed
        self._removed = []
        for queue, idle in removed:
            self._take(queue, idle, minute, now)
        for queue, source in counts.copy().items():
            seen = self._seen.get(queue)
            if seen is None or seen.source is not source:
                seen = self._seen[queue] = _Seen(source, changed=now)
            self._take(queue, seen, minute, now)
            if now - seen.changed >= IDLE_SECONDS:
                del counts[queue], self._seen[queue]
                self._removed.append((queue, seen))
        if removed or len(self._totals) > len(self._unstored):
            self._forget_stored(minute)

    def unstored(self) -> list[tuple[Key, tuple[float, ...]]]:
        """Return the unwritten rows, oldest first."""
        return [(key, tuple(self._totals[key].counts)) for key in self._unstored]

    def confirm(self, rows: Iterable[tuple[Key, tuple[float, ...]]]) -> None:
        """Record that the database has stored these rows of `unstored`."""
        for key, counts in rows:
            totals = self._totals[key]
            totals.stored = counts
            if tuple(totals.counts) == counts:
                del self._unstored[key]

    def limit(self, most: int = MAX_KEPT) -> None:
        """Drop the newest rows above the limit `most`, and count their attempts."""
        for key in list(self._unstored)[most:]:
            totals = self._totals[key]
            self.dropped += attempts_in(totals.counts) - attempts_in(totals.stored)
            totals.counts = list(totals.stored)
            del self._unstored[key]

    def _take(self, queue: str, seen: _Seen, minute: int, now: float) -> None:
        counts = tuple(seen.source)  # one step, so the event loop cannot count meanwhile
        if counts == seen.counts:
            return
        key = (queue, minute)
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = MinuteTotals()
        totals.counts = [
            total + new - old
            for total, new, old in zip(totals.counts, counts, seen.counts, strict=True)
        ]
        self._unstored[key] = None
        seen.counts = counts
        seen.changed = now

    def _forget_stored(self, minute: int) -> None:
        # Keep a row that is not stored, because the database may have a part of its totals.
        over = [key for key in self._totals if key[1] != minute and key not in self._unstored]
        for key in over:
            del self._totals[key]


class HistoryWriter:
    """Writes the counts of a recorder. `host` is the name of this machine in the history."""

    def __init__(
        self,
        url: str,
        app: str,
        recorder: Recorder,
        now: Callable[[], float] = time.time,
        host: str = "",
    ) -> None:
        self._engine = open_engine(url, writes=True)
        from qdo.history import tables  # imports SQLAlchemy, which `open_engine` has checked

        self._tables: Any = tables
        self._shown = hide_credentials(url)
        self._app = app
        self._recorder = recorder
        self._now = now
        # No other process ever has this name, and it does not change, unlike the name of a worker
        # node.
        self._host = _clean(host or socket.gethostname())
        self.worker = f"{self._host}:{os.getpid()}:{secrets.token_hex(6)}"
        self.failing = False
        self._minutes = Minutes()
        self._runs: dict[int, RecordedRun] = {}
        self._next_run = 0
        self._owners: list[OwnerRow] = []
        self._reported_drops = 0
        self._delete_at = 0.0
        self._connection: Connection | None = None
        self._path = sqlite_path(url)
        self._fork_guard: ForkGuard | contextlib.nullcontext[None] = contextlib.nullcontext()
        if self._path is not None:
            with unforked:
                self._fork_guard = ForkGuard(self._path, lambda: None)
        self._file: ReplacedFileCheck | None = None
        self._orders = inbox()
        self._ended = False

    @property
    def dropped(self) -> int:
        """Number of dropped attempts, and dropped rows of attempts and owners."""
        recorder = self._recorder
        return self._minutes.dropped + recorder.dropped_runs + recorder.owners.dropped

    # --- the thread -------------------------------------------------------------------

    def start(self) -> None:
        start_thread(self._work)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Write the last rows, and end the thread. Give up after `seconds`."""
        self._orders.put(None)
        limit = time.monotonic() + seconds
        while not self._ended:
            if time.monotonic() > limit:
                _log.warning("history: %s does not answer; its newest rows are lost", self._shown)
                return
            time.sleep(0.005)  # lets greenlets run

    def _work(self) -> None:
        over = False
        taken = 0.0
        while not over:
            with contextlib.suppress(Empty):
                over = self._orders.get(timeout=pause_after(taken)) is None
            began = time.thread_time()
            try:
                self.step()
            except Exception:  # noqa: BLE001 - a history must not end a worker
                _log.exception("history: writing to %s failed; trying again", self._shown)
            taken = time.thread_time() - began
        while self._recorder.owners.pending and not self.failing:
            self.step()  # writes the ends of claims after a drain
        self._disconnect()
        self._ended = True

    # --- one write --------------------------------------------------------------------

    def step(self) -> None:
        """Write the counts since the last call. After an error, keep them for the next call."""
        now = self._now()
        self._minutes.collect(self._recorder.counts, now)
        self._collect_runs()
        self._collect_owners()
        minutes = self._minutes.unstored()
        runs = list(self._runs.items())
        actions = list(self._recorder.actions)
        rows = minutes or runs or actions or self._owners
        if rows or (now >= self._delete_at and not self.failing):
            try:
                self._write(minutes, runs, actions, now)
            except Exception as error:  # noqa: BLE001 - databases raise what their drivers raise
                self._disconnect()
                self._failed(error)
            else:
                self._minutes.confirm(minutes)
                for number, _ in runs:
                    del self._runs[number]
                for _ in actions:
                    self._recorder.actions.popleft()
                self._owners.clear()
                self._succeeded()
        if len(self._minutes) > MAX_KEPT:
            self._minutes.limit()
        self._report_drops()

    def _collect_runs(self) -> None:
        found = self._recorder.runs
        while found and len(self._runs) < MAX_KEPT:
            self._runs[self._next_run] = found.popleft()
            self._next_run += 1

    def _collect_owners(self) -> None:
        found = self._recorder.owners.pending
        while found and len(self._owners) < OWNERS_AT_ONCE:
            self._owners.append(found.popleft())

    def _write(
        self,
        minutes: Sequence[tuple[Key, tuple[float, ...]]],
        runs: Sequence[tuple[int, RecordedRun]],
        actions: Sequence[RecordedAction],
        now: float,
    ) -> None:
        tables = self._tables
        with self._fork_guard, self._connect().begin() as transaction:
            connection = transaction.connection
            if minutes:
                rows = [self._minute_row(key, counts) for key, counts in minutes]
                tables.write_minutes(connection, rows)
            if runs:
                rows = [self._run_row(number, run) for number, run in runs]
                tables.write_once(connection, tables.RUNS, rows)
            if actions:
                rows = [self._action_row(each) for each in actions]
                tables.write_once(connection, tables.ACTIONS, rows)
            if self._owners:
                tables.write_owners(connection, list(map(self._owner_row, self._owners)))
            if now >= self._delete_at:
                rows_before = now - RETENTION_SECONDS
                actions_before = now - ACTION_RETENTION_SECONDS
                tables.delete_older(connection, self._app, rows_before, actions_before)
        if now >= self._delete_at:
            self._delete_at = now + _DELETE_SECONDS

    def _connect(self) -> Connection:
        try:
            if self._file is not None:
                self._file.check()
        except DatabaseReplacedError as error:
            # SQLite would continue to write to the removed file, which readers cannot see.
            reason = error.details["reason"]
            _log.warning("history: %s; writing to %s from now on", reason, self._shown)
            self._abandon()
        if self._connection is None:
            self._connection = self._engine.connect()
            with self._connection.begin():
                self._tables.create(self._connection)
            if self._path is not None:
                self._file = ReplacedFileCheck(self._path)
        return self._connection

    def _disconnect(self) -> None:
        with self._fork_guard:
            self._abandon()

    def _abandon(self) -> None:
        connection = self._connection
        self._connection = self._file = None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.invalidate()
            with contextlib.suppress(Exception):
                connection.close()

    def _minute_row(self, key: Key, counts: Sequence[float]) -> dict[str, Any]:
        name, minute = key
        durations = [int(each) for each in counts[FIRST_BUCKET:]]
        return {
            "app": self._app,
            "queue": _clean(name),
            "minute": minute,
            "worker": self.worker,
            "attempts": attempts_in(counts),
            "done": sum(durations),
            "failed": int(counts[FAILED]),
            "retried": int(counts[RETRIED]),
            "dead_lettered": int(counts[DEAD_LETTERED]),
            "busy_seconds": counts[BUSY],
            **dict(zip(self._tables.DURATIONS, durations, strict=True)),
        }

    def _run_row(self, number: int, run: RecordedRun) -> dict[str, Any]:
        return {
            "app": self._app,
            "worker": self.worker,
            "number": number,
            "queue": _clean(run.queue),
            "id": _clean(run.id),
            "attempt": run.attempt,
            "outcome": run.outcome,
            "error": None if run.error is None else _clean(run.error),
            "seconds": run.seconds,
            "at": run.at,
        }

    def _action_row(self, action: RecordedAction) -> dict[str, Any]:
        row = {"app": self._app, **asdict(action)}
        return {key: _clean(each) if isinstance(each, str) else each for key, each in row.items()}

    def _owner_row(self, row: OwnerRow) -> dict[str, Any]:
        return {
            "app": self._app,
            "worker": self.worker,
            "host": self._host,
            "pid": os.getpid(),
            **row._asdict(),
            "queue": _clean(row.queue),
        }

    # --- reports ----------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        if not self.failing:
            self.failing = True
            _log.warning(
                "history: cannot write to %s; messages are processed, and up to %d rows are kept"
                " until it answers: %s",
                self._shown,
                MAX_KEPT,
                describe(getattr(error, "orig", None) or error),
            )

    def _succeeded(self) -> None:
        if self.failing:
            self.failing = False
            _log.info("history: writing to %s again", self._shown)

    def _report_drops(self) -> None:
        if self.dropped and not self._reported_drops:
            _log.warning(
                "history: the limit on kept rows is reached; further rows are counted and dropped"
                " until %s answers",
                self._shown,
            )
            self._reported_drops = self.dropped
        elif self.dropped > self._reported_drops and not self.failing:
            _log.warning(
                "history: dropped %d attempts and owners while %s was unavailable",
                self.dropped,
                self._shown,
            )
            self._reported_drops = self.dropped


def pause_after(taken: float) -> float:
    """Return the seconds until the next write, given the processor time of the last write."""
    return max(WRITE_SECONDS, taken / WRITE_SHARE)


def _clean(text: str) -> str:
    """Return a text that both databases can store: valid Unicode without NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return printable(text)
    return printable(text) if "\0" in text else text
