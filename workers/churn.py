"""Computes exact totals of commit records per queue, even when workers crash or freeze.

A message is the record of a commit: ``{"repo", "commit", "parents", "time", "files", "insertions",
"deletions"}``. The totals are in a SQLite file with one row per queue. The variable CHURN_DB names
the file (default ``qdo-data/churn.db``). The transaction that changes a row also writes the proof
that the message was counted, a row of `qdo.idempotency.FencedWrites`:

- A message at or before the recorded position changes nothing, because it was delivered again after
  a crash.
- A message with a smaller fence than the recorded fence changes nothing, because it comes from a
  worker that has lost the queue and has not noticed yet.

With SQS, positions change with every delivery. Then the proof is a row of
`qdo.idempotency.ProcessedMessages`. A message with an id that was counted before changes nothing.

::

    qdo send --app churn --file commits.jsonl --queue-field repo
    qdo-worker --app churn --job qdo.programs.churn:job --burst
    python -m qdo.programs.churn

The last command prints the totals and checks that no commit was counted before one of its parents.
If the check fails, the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ujson

from qdo import App, DeadLetter, Message, QdoError
from qdo.errors import NotFoundError
from qdo.idempotency import FencedWrites, ProcessedMessages, Write
from qdo.system.sqlite import Format, open_database, translated

_log = logging.getLogger(__name__)

DEFAULT_PATH = "qdo-data/churn.db"
PATH_VARIABLE = "CHURN_DB"

_writes = FencedWrites()
_done = ProcessedMessages()

FORMAT = Format(
    name="churn ledger",
    application_id=0x71646F63,  # "qdoc"
    version=3,
    schema=f"""
        {_writes.schema};
        {_done.schema};
        CREATE TABLE totals (
            queue TEXT PRIMARY KEY,
            commits INTEGER NOT NULL,
            insertions INTEGER NOT NULL,
            deletions INTEGER NOT NULL,
            refused INTEGER NOT NULL DEFAULT 0
        ) WITHOUT ROWID;
        CREATE TABLE counted (
            place INTEGER PRIMARY KEY,
            queue TEXT NOT NULL,
            position TEXT NOT NULL,
            commit_id TEXT NOT NULL,
            parents TEXT NOT NULL
        )
    """,
)

_ADD = """
    INSERT INTO totals (queue, commits, insertions, deletions)
    VALUES (:queue, 1, :insertions, :deletions)
    ON CONFLICT (queue) DO UPDATE SET
        commits = commits + 1,
        insertions = insertions + excluded.insertions,
        deletions = deletions + excluded.deletions
"""
_NOTE = """
    INSERT INTO counted (queue, position, commit_id, parents)
    VALUES (:queue, :position, :commit, :parents)
"""
_REFUSE = "UPDATE totals SET refused = refused + 1 WHERE queue = :queue"
_TOTALS = "SELECT queue, commits, insertions, deletions, refused FROM totals ORDER BY queue"
_IN_ORDER = "SELECT commit_id, parents FROM counted WHERE queue = ? ORDER BY place"


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of one queue.

    :ivar refused: number of writes rejected because their fence was outdated.
    :ivar before_parent: number of commits counted before one of their parents; 0 unless messages
        ran out of order.
    """

    queue: str
    commits: int
    insertions: int
    deletions: int
    refused: int
    before_parent: int


class TotalsFile:
    """The totals of every queue in a SQLite file. Several processes may write to the file."""

    def __init__(self, path: str) -> None:
        self._path = path
        # Do not sync commits. A crash of a process loses nothing. Only a power failure may lose
        # commits.
        self._database = open_database(path, FORMAT, durable=False)
        self._lock = threading.Lock()

    def count(self, message: Message) -> bool:
        """Count a message exactly once; return whether the message was new.

        :raises DeadLetter: the body is not a commit record.
        """
        row = {
            "queue": message.queue,
            "position": str(message.position),
            **_record(message.body),
        }
        with self._lock, translated(self._path), self._transaction():
            write = self._admit(message)
            if write is Write.NEW:
                self._database.execute(_ADD, row)
                self._database.execute(_NOTE, row)
            elif write is Write.STALE:
                self._database.execute(_REFUSE, row)
        if write is Write.STALE:
            _log.warning(
                "%s: rejected a write with outdated fence %d", message.queue, message.fence
            )
        return bool(write)

    def _admit(self, message: Message) -> Write:
        if message.stable:
            return _writes.admit(self._database, message)
        return Write.NEW if _done.record(self._database, message) else Write.REPEATED

    def totals(self) -> list[Totals]:
        with self._lock, translated(self._path):
            return [self._totals(*row) for row in self._database.execute(_TOTALS).fetchall()]

    def _totals(
        self, queue: str, commits: int, insertions: int, deletions: int, refused: int
    ) -> Totals:
        rows = self._database.execute(_IN_ORDER, (queue,)).fetchall()
        early = count_before_parent([(commit, ujson.loads(parents)) for commit, parents in rows])
        return Totals(queue, commits, insertions, deletions, refused, early)

    def close(self) -> None:
        self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE waits for other writers here, before the transaction reads.
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def count_before_parent(commits: Sequence[tuple[str, Sequence[str]]]) -> int:
    """Return the number of commits that come before one of their parents.

    Ignore parents that are not among the commits, because they have no messages.
    """
    first: dict[str, int] = {}
    for place, (commit, _) in enumerate(commits):
        first.setdefault(commit, place)
    return sum(
        any(first.get(parent, -1) > place for parent in parents)
        for place, (_, parents) in enumerate(commits)
    )


def _record(body: Any) -> dict[str, Any]:
    try:
        return {
            "commit": str(body["commit"]),
            "parents": ujson.dumps(list(map(str, body["parents"]))),
            "insertions": int(body["insertions"]),
            "deletions": int(body["deletions"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DeadLetter(f"not a commit record: {type(error).__name__}: {error}") from error


def ledger_path() -> str:
    return os.environ.get(PATH_VARIABLE) or DEFAULT_PATH


@contextlib.contextmanager
def job_context() -> Iterator[dict[str, Any]]:
    """Yield a context with an open ledger."""
    with contextlib.closing(TotalsFile(ledger_path())) as ledger:
        yield {"ledger": ledger}


app = App("churn", job_context=job_context)


@app.job()
def job(message: Message, context: dict[str, Any]) -> None:
    ledger = context.get("ledger")
    if ledger is None:  # the worker was started with --job, without the context above
        ledger = context["ledger"] = TotalsFile(ledger_path())
    ledger.count(message)


# --- the report -------------------------------------------------------------------


def report(path: str, form: str = "table") -> int:
    """Print the totals of every queue; return 1 if a commit was counted before its parent.

    :raises NotFoundError: the file does not exist.
    """
    from qdo.cli.output import emit, print_message

    if not os.path.exists(path):
        raise NotFoundError(what="ledger", name=path)
    with contextlib.closing(TotalsFile(path)) as ledger:
        totals = ledger.totals()
    names = Totals.__dataclass_fields__
    emit(
        "churn.totals/1",
        [asdict(each) for each in totals],
        form,
        {name: name.replace("_", " ").upper() for name in names},
    )
    early = sum(each.before_parent for each in totals)
    print_message(
        f"{len(totals)} queues, {sum(each.commits for each in totals)} commits, "
        f"{early} counted before a parent"
    )
    return 1 if early else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m qdo.programs.churn``; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m qdo.programs.churn",
        description="Print the totals of every queue; exit with 1 if a commit was counted before "
        "its parent.",
    )
    parser.add_argument("command", nargs="?", choices=["report"], default="report")
    parser.add_argument("--ledger", default=ledger_path(), help="the SQLite file (%(default)s)")
    parser.add_argument("-o", "--output", choices=["table", "json", "jsonl"], default="table")
    given = parser.parse_args(arguments)
    try:
        return report(given.ledger, given.output)
    except QdoError as error:
        print(f"churn: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
