"""Reads the totals and owners of queues, and individual attempts, from a history.

Every function raises the errors of `queue_reports`. `since` is a Unix time. Totals include the
whole minute of this time. Claims that ended earlier are omitted. `limit` is the maximum number of
rows.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any

from qdo.errors import HistoryUnreadableError
from qdo.fleet.audit_entries import is_selected
from qdo.history.address import open_engine
from qdo.history.recorder import RecordedAction, RecordedRun, percentile
from qdo.system.files import sqlite_path
from qdo.text import describe, hide_credentials

if TYPE_CHECKING:
    from sqlalchemy import Connection

_FETCHED = 1000
_GLOB = re.compile(r"[*?\[]")
# Minimum number of attempts from which to compute the usual duration of a queue's attempts.
USUAL_ATTEMPTS = 10
# The reason for the end of a claim if the process did not record the end.
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class QueueReport:
    """The outcomes of the attempts of one queue."""

    queue: str
    # Number of attempts that returned.
    done: int
    # Number of attempts that failed. Workers retried some messages and made others dead letters.
    failed: int
    retried: int
    dead_lettered: int
    # Mean duration of all attempts that ran, or None.
    mean_seconds: float | None
    # Upper bound of the durations of 95 % of the attempts that returned, or None. The value is the
    # bound of a class of durations.
    p95_seconds: float | None


def queue_reports(url: str, app: str, since: float, glob: str = "*") -> list[QueueReport]:
    """Return the totals of queues, sorted by name.

    :raises SettingsError: the address is invalid, or a library is missing.
    :raises HistoryUnreadableError: the database does not respond.
    :raises DatabaseError: the file cannot be used. The subclasses name the reasons.
    """

    def query(columns: Any) -> Any:
        from sqlalchemy import func, select

        from qdo.history.tables import DURATIONS

        summed = ("done", "failed", "retried", "dead_lettered", "busy_seconds", *DURATIONS)
        totals = [func.sum(columns[name]) for name in summed]
        totalled = select(columns.queue, *totals).group_by(columns.queue)
        return totalled.where(columns.app == app, columns.minute >= int(since) // 60 * 60)

    rows = sorted(_rows(url, "qdo_minutes", query), key=lambda row: str(row[0]))
    return [_report(queue, counts) for queue, *counts in rows if fnmatchcase(queue, glob)]


def _report(queue: str, counts: list[Any]) -> QueueReport:
    # In PostgreSQL, sums of integers have the type Decimal.
    done, failed, retried, dead_lettered = map(int, counts[:4])
    mean = _mean(float(counts[4]), done + failed)
    p95 = percentile([int(each) for each in counts[5:]], 0.95)
    return QueueReport(queue, done, failed, retried, dead_lettered, mean, p95)


@dataclass(frozen=True, slots=True)
class MinuteReport:
    """The durations of a queue's attempts that ended in one minute."""

    # Unix time at which the minute begins.
    minute: int
    done: int
    failed: int
    # Mean duration of all attempts that ran, or None. The following fields may also be None.
    mean_seconds: float | None
    # Upper bound of the durations of half of the attempts that returned. `p95_seconds` is the bound
    # of 95 % of these attempts, and `max_seconds` is the bound of all.
    p50_seconds: float | None
    p95_seconds: float | None
    max_seconds: float | None


def minute_reports(
    url: str, app: str, queue: str | None, since: float, *, limit: int
) -> list[MinuteReport]:
    """Return the minutes in which attempts of a queue, or of all queues, ended, newest first."""

    def query(columns: Any) -> Any:
        from qdo.history.tables import DURATIONS

        names = ("done", "failed", "busy_seconds", *DURATIONS)
        found = _by_minute(columns, app, queue, names, limit)
        return found.where(columns.minute >= int(since) // 60 * 60)

    return [_minute(minute, counts) for minute, *counts in _rows(url, "qdo_minutes", query)]


def _minute(minute: int, counts: list[Any]) -> MinuteReport:
    done, failed = map(int, counts[:2])
    classes = [int(each) for each in counts[3:]]
    return MinuteReport(
        int(minute),
        done,
        failed,
        mean_seconds=_mean(float(counts[2]), done + failed),
        p50_seconds=percentile(classes, 0.5),
        p95_seconds=percentile(classes, 0.95),
        max_seconds=percentile(classes, 1.0),
    )


def _mean(busy_seconds: float, attempts: int) -> float | None:
    # Attempts that failed before the job ran took no time.
    return busy_seconds / attempts if busy_seconds and attempts else None


def usual_seconds(url: str, app: str, queues: Iterable[str]) -> dict[str, float]:
    """Return the usual duration of an attempt for each queue. Omit unknown queues."""
    # Compute the mean of the newest minutes that together have at least `USUAL_ATTEMPTS` attempts.
    found: dict[str, float] = {}
    with _opened(url, "qdo_minutes") as connection:
        if connection is None:
            return found
        from qdo.history.tables import MINUTES

        columns = MINUTES.c
        for queue in queues:
            query = _by_minute(columns, app, queue, ("attempts", "busy_seconds"), USUAL_ATTEMPTS)
            attempts = 0
            busy = 0.0
            for _, count, seconds in connection.execute(query):
                attempts += int(count)
                busy += float(seconds)
                if attempts >= USUAL_ATTEMPTS:
                    break
            if attempts and busy:
                found[queue] = busy / attempts
    return found


def _by_minute(columns: Any, app: str, queue: str | None, names: Iterable[str], limit: int) -> Any:
    """Return a query for the sums of columns in each minute, newest first."""
    from sqlalchemy import func, select

    sums = [func.sum(columns[name]) for name in names]
    query = select(columns.minute, *sums).where(columns.app == app)
    if queue is not None:
        query = query.where(columns.queue == queue)
    return query.group_by(columns.minute).order_by(columns.minute.desc()).limit(limit)


def failures(
    url: str, app: str, since: float, glob: str = "*", *, limit: int, slow: bool = False
) -> list[RecordedRun]:
    """Return failed attempts, or attempts that returned after a long time, newest first."""

    def query(columns: Any) -> Any:
        from sqlalchemy import select

        kind = columns.outcome == "done" if slow else columns.outcome != "done"
        selected = select(*(columns[each.name] for each in fields(RecordedRun)))
        selected = selected.where(columns.app == app, columns.at >= since, kind)
        if not _GLOB.search(glob):
            selected = selected.where(columns.queue == glob)  # only this queue
        return selected.order_by(columns.at.desc(), columns.worker, columns.number)

    with contextlib.closing(_rows(url, "qdo_runs", query)) as rows:
        matching = (RecordedRun(*row) for row in rows if fnmatchcase(row.queue, glob))
        return list(islice(matching, limit))


def actions(
    url: str, app: str, since: float, glob: str = "*", *, limit: int
) -> list[RecordedAction]:
    """Return operators' changes whose command or target matches, newest first."""

    def query(columns: Any) -> Any:
        from sqlalchemy import select

        selected = select(*(columns[each.name] for each in fields(RecordedAction)))
        selected = selected.where(columns.app == app, columns.at >= since)
        return selected.order_by(columns.at.desc(), columns.id.desc())

    with contextlib.closing(_rows(url, "qdo_actions", query)) as rows:
        chosen = (row for row in rows if is_selected(row.command, row.target, glob))
        return [RecordedAction(*row) for row in islice(chosen, limit)]


@dataclass(frozen=True, slots=True)
class RecordedOwner:
    """A period in which one worker process owned a queue."""

    # Unix time. `ended` is also a Unix time.
    claimed: float
    # None if the claim is open, or if the worker died before it recorded the end.
    ended: float | None
    owner: str
    host: str
    pid: int
    fence: int
    # The reason why the claim ended, or `UNKNOWN`; None while the claim is open.
    why: str | None


def owners(url: str, app: str, queue: str, since: float, *, limit: int) -> list[RecordedOwner]:
    """Return the processes that owned a queue, newest first."""

    def query(columns: Any) -> Any:
        from sqlalchemy import select

        selected = select(*(columns[each.name] for each in fields(RecordedOwner)))
        selected = selected.where(columns.app == app, columns.queue == queue)
        # Sort claims by fence, because the clocks of machines differ.
        return selected.order_by(columns.fence.desc(), columns.claimed.desc()).limit(limit)

    found: list[RecordedOwner] = []
    later: float | None = None
    with contextlib.closing(_rows(url, "qdo_owners", query)) as rows:
        for row in rows:
            owner = RecordedOwner(*row)
            # A newest claim without an end is open. An older claim without an end ended before the
            # next claim, because its process was killed or could not write the end.
            if owner.ended is None and later is not None:
                owner = replace(owner, why=UNKNOWN)
            ended = owner.ended or later
            if ended is not None and ended < since:
                break
            found.append(owner)
            later = owner.claimed
    return found


def claims(
    url: str, app: str, since: float, glob: str = "*", *, limit: int
) -> list[tuple[str, RecordedOwner]]:
    """Return queues with claims that began or ended since a time, newest first."""

    def query(columns: Any) -> Any:
        from sqlalchemy import or_, select

        selected = select(columns.queue, *(columns[each.name] for each in fields(RecordedOwner)))
        recent = or_(columns.claimed >= since, columns.ended >= since)
        selected = selected.where(columns.app == app, recent)
        return selected.order_by(columns.claimed.desc(), columns.queue)

    with contextlib.closing(_rows(url, "qdo_owners", query)) as rows:
        matching = (row for row in rows if fnmatchcase(row[0], glob))
        return [(queue, RecordedOwner(*row)) for queue, *row in islice(matching, limit)]


def _rows(url: str, table: str, query: Callable[[Any], Any]) -> Generator[Any, None, None]:
    """Yield the rows of a query, which the function `query` builds from the columns of a table.

    Close the generator if you stop early, because it holds a connection to the database.
    """
    with _opened(url, table) as connection:
        if connection is not None:
            from qdo.history.tables import METADATA

            columns = METADATA.tables[table].c
            options = connection.execution_options(yield_per=_FETCHED)
            # Fetch rows in parts, because a caller may need only the first of a million rows.
            with options.execute(query(columns)) as rows:
                yield from rows


@contextlib.contextmanager
def _opened(url: str, table: str) -> Iterator[Connection | None]:
    """Yield a connection, or None if the database exists but lacks the table."""
    engine = open_engine(url, writes=False)
    from sqlalchemy.exc import SQLAlchemyError

    from qdo.history.tables import METADATA, is_created

    path = sqlite_path(url)
    if path is not None and not os.path.exists(path):
        # Do not create a file for reading. Usually the path is wrong or relative to another folder.
        reason = "there is no such file, and no worker has recorded anything in it"
        raise HistoryUnreadableError(address=url, reason=reason)
    try:
        with engine.connect() as connection:
            created = is_created(connection, METADATA.tables[table])
            yield connection if created else None
    except SQLAlchemyError as error:
        reason = describe(getattr(error, "orig", None) or error)
        raise HistoryUnreadableError(address=hide_credentials(url), reason=reason) from error
