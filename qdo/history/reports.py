"""Read a history: totals and owners of queues, and single attempts.

Every function raises the errors of `queue_reports`. `since` is a Unix time: totals count the
whole minute that contains it, and claims that ended before are left out. `limit` is the most rows
returned.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
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
USUAL_ATTEMPTS = 10
"""Attempts that show how long those of a queue usually take."""
UNKNOWN = "unknown"
"""Why a claim ended whose process did not record it."""


@dataclass(frozen=True, slots=True)
class QueueReport:
    """The outcomes of the attempts of one queue.

    :ivar done: attempts that returned.
    :ivar failed: those that failed; some were retried, some became dead letters.
    :ivar mean_seconds: of all attempts that ran; None without any.
    :ivar p95_seconds: upper bound of the class of durations that 95 % of the attempts that returned
        did not exceed; None without any.
    """

    queue: str
    done: int
    failed: int
    retried: int
    dead_lettered: int
    mean_seconds: float | None
    p95_seconds: float | None


def queue_reports(url: str, app: str, since: float, glob: str = "*") -> list[QueueReport]:
    """Return the totals of queues, by name.

    :raises SettingsError: the address is invalid, or a library is missing.
    :raises HistoryUnreadableError: the database does not answer.
    :raises DatabaseError: the file cannot be used; see its subclasses.
    """
    with _opened(url, "qdo_minutes") as connection:
        if connection is None:
            return []
        from sqlalchemy import func, select

        from qdo.history.tables import DURATIONS, MINUTES

        columns = MINUTES.c
        summed = ["done", "failed", "retried", "dead_lettered", "busy_seconds", *DURATIONS]
        totals = [func.sum(columns[name]) for name in summed]
        chosen = (columns.app == app, columns.minute >= int(since) // 60 * 60)
        query = select(columns.queue, *totals).where(*chosen)
        found = connection.execute(query.group_by(columns.queue)).all()
    rows = sorted(found, key=lambda row: str(row[0]))
    return [_report(queue, counts) for queue, *counts in rows if fnmatchcase(queue, glob)]


def _report(queue: str, counts: list[Any]) -> QueueReport:
    # Sums of integers are decimals in PostgreSQL.
    done, failed, retried, dead_lettered = map(int, counts[:4])
    busy = float(counts[4])
    # Attempts that failed without a run took no time.
    mean = busy / (done + failed) if busy and done + failed else None
    p95 = percentile([int(each) for each in counts[5:]], 0.95)
    return QueueReport(queue, done, failed, retried, dead_lettered, mean, p95)


@dataclass(frozen=True, slots=True)
class MinuteReport:
    """How long the attempts of one queue took that ended in one minute.

    :ivar minute: its beginning, Unix time.
    :ivar mean_seconds: of all attempts that ran; None without any, as are the others.
    :ivar p50_seconds: upper bound of the class of durations that half of those that returned did
        not exceed, as `p95_seconds` for 95 %, and `max_seconds` for all.
    """

    minute: int
    done: int
    failed: int
    mean_seconds: float | None
    p50_seconds: float | None
    p95_seconds: float | None
    max_seconds: float | None


def minute_reports(
    url: str, app: str, queue: str | None, since: float, *, limit: int
) -> list[MinuteReport]:
    """Return the minutes in which attempts of a queue, or of all, ended; newest first."""
    with _opened(url, "qdo_minutes") as connection:
        if connection is None:
            return []
        from qdo.history.tables import DURATIONS

        names = ("done", "failed", "busy_seconds", *DURATIONS)
        query = _by_minute(app, queue, names, limit)
        query = query.where(_minutes().minute >= int(since) // 60 * 60)
        return [_minute(minute, counts) for minute, *counts in connection.execute(query)]


def _minute(minute: int, counts: list[Any]) -> MinuteReport:
    done, failed, busy = int(counts[0]), int(counts[1]), float(counts[2])
    classes = [int(each) for each in counts[3:]]
    p50, p95, most = (percentile(classes, share) for share in (0.5, 0.95, 1.0))
    mean = busy / (done + failed) if busy and done + failed else None
    return MinuteReport(int(minute), done, failed, mean, p50, p95, most)


def usual_seconds(url: str, app: str, queues: Iterable[str]) -> dict[str, float]:
    """Return how long an attempt of each queue usually takes, without unknown queues.

    It is the mean of the newest minutes that have at least `USUAL_ATTEMPTS` attempts together.
    """
    found: dict[str, float] = {}
    with _opened(url, "qdo_minutes") as connection:
        if connection is None:
            return found
        for queue in queues:
            query = _by_minute(app, queue, ("attempts", "busy_seconds"), USUAL_ATTEMPTS)
            attempts, busy = 0, 0.0
            for _, count, seconds in connection.execute(query):
                attempts, busy = attempts + int(count), busy + float(seconds)
                if attempts >= USUAL_ATTEMPTS:
                    break
            if attempts and busy:
                found[queue] = busy / attempts
    return found


def _by_minute(app: str, queue: str | None, names: Iterable[str], limit: int) -> Any:
    """Return a query for the sums of columns in each minute, newest first."""
    from sqlalchemy import func, select

    columns = _minutes()
    sums = [func.sum(columns[name]) for name in names]
    query = select(columns.minute, *sums).where(columns.app == app)
    if queue is not None:
        query = query.where(columns.queue == queue)
    return query.group_by(columns.minute).order_by(columns.minute.desc()).limit(limit)


def _minutes() -> Any:
    from qdo.history.tables import MINUTES

    return MINUTES.c


def failures(
    url: str, app: str, since: float, glob: str = "*", *, limit: int, slow: bool = False
) -> list[RecordedRun]:
    """Return attempts that failed, newest first.

    :param slow: return those that returned after a long time instead.
    """
    with _opened(url, "qdo_runs") as connection:
        if connection is None:
            return []
        from sqlalchemy import select

        from qdo.history.tables import RUNS

        columns = RUNS.c
        kind = columns.outcome == "done" if slow else columns.outcome != "done"
        query = select(
            columns.queue,
            columns.id,
            columns.attempt,
            columns.outcome,
            columns.error,
            columns.seconds,
            columns.at,
        ).where(columns.app == app, columns.at >= since, kind)
        if not _GLOB.search(glob):
            query = query.where(columns.queue == glob)  # one queue of many
        ordered = query.order_by(columns.at.desc(), columns.worker, columns.number)
        result: list[RecordedRun] = []
        rows = connection.execution_options(yield_per=_FETCHED).execute(ordered)
        for row in rows:
            if fnmatchcase(row.queue, glob):
                result.append(RecordedRun(*row))
                if len(result) >= limit:
                    break
        rows.close()
        return result


def actions(
    url: str, app: str, since: float, glob: str = "*", *, limit: int
) -> list[RecordedAction]:
    """Return changes that operators made, newest first.

    :param glob: matches the command, or what was changed.
    """
    with _opened(url, "qdo_actions") as connection:
        if connection is None:
            return []
        from sqlalchemy import select

        from qdo.history.tables import ACTIONS

        columns = ACTIONS.c
        shown = [columns[each.name] for each in fields(RecordedAction)]
        query = select(*shown).where(columns.app == app, columns.at >= since)
        rows = connection.execute(query.order_by(columns.at.desc(), columns.id.desc()))
        wanted = (
            RecordedAction(*row) for row in rows if is_selected(row.command, row.target, glob)
        )
        return list(islice(wanted, limit))


@dataclass(frozen=True, slots=True)
class RecordedOwner:
    """A time in which one worker process owned a queue.

    :ivar claimed: Unix time, as is `ended`.
    :ivar ended: None if it is open, or if its worker died before it recorded the end.
    :ivar why: why it ended, or `UNKNOWN`; None while it is open.
    """

    claimed: float
    ended: float | None
    owner: str
    host: str
    pid: int
    fence: int
    why: str | None


def owners(url: str, app: str, queue: str, since: float, *, limit: int) -> list[RecordedOwner]:
    """Return the processes that owned a queue, newest first.

    A claim without an end is open if it is the newest. Otherwise its process was killed, or could
    not write the end: then it ended before the next claim.
    """
    result: list[RecordedOwner] = []
    with _opened(url, "qdo_owners") as connection:
        if connection is None:
            return result
        from sqlalchemy import select

        from qdo.history.tables import OWNERS

        columns = OWNERS.c
        shown = [columns[each.name] for each in fields(RecordedOwner)]
        query = select(*shown).where(columns.app == app, columns.queue == queue)
        # The fence orders claims whatever the clocks of their machines say.
        query = query.order_by(columns.fence.desc(), columns.claimed.desc()).limit(limit)
        later: float | None = None
        for row in connection.execute(query):
            found = RecordedOwner(*row)
            if found.ended is None and later is not None:
                found = replace(found, why=UNKNOWN)
            ended = found.ended or later
            if ended is not None and ended < since:
                break
            result.append(found)
            later = found.claimed
    return result


def claims(
    url: str, app: str, since: float, glob: str = "*", *, limit: int
) -> list[tuple[str, RecordedOwner]]:
    """Return queues and claims that began or ended, newest first."""
    with _opened(url, "qdo_owners") as connection:
        if connection is None:
            return []
        from sqlalchemy import or_, select

        from qdo.history.tables import OWNERS

        columns = OWNERS.c
        shown = [columns[each.name] for each in fields(RecordedOwner)]
        query = select(columns.queue, *shown).where(
            columns.app == app, or_(columns.claimed >= since, columns.ended >= since)
        )
        ordered = query.order_by(columns.claimed.desc(), columns.queue)
        rows = connection.execution_options(yield_per=_FETCHED).execute(ordered)
        wanted = ((queue, row) for queue, *row in rows if fnmatchcase(queue, glob))
        found = [(queue, RecordedOwner(*row)) for queue, row in islice(wanted, limit)]
        rows.close()
        return found


@contextlib.contextmanager
def _opened(url: str, table: str) -> Iterator[Connection | None]:
    """Yield a connection; None if a database that exists has no such table yet."""
    engine = open_engine(url, writes=False)
    from sqlalchemy.exc import SQLAlchemyError

    from qdo.history.tables import METADATA, is_created

    path = sqlite_path(url)
    if path is not None and not os.path.exists(path):
        # Reading creates no file. Usually the path is wrong, or relative to another folder.
        reason = "there is no such file, and no worker has recorded anything in it"
        raise HistoryUnreadableError(address=url, reason=reason)
    try:
        with engine.connect() as connection:
            created = is_created(connection, METADATA.tables[table])
            yield connection if created else None
    except SQLAlchemyError as error:
        reason = describe(getattr(error, "orig", None) or error)
        raise HistoryUnreadableError(address=hide_credentials(url), reason=reason) from error
