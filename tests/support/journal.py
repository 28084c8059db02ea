"""An app that writes down every run of its job: where, which message, by whom, when.

::

    TESTS_JOURNAL=runs.db qdo-worker tests.support.journal:app
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qdo import App, Message

PATH_VARIABLE = "TESTS_JOURNAL"
ORDER_VARIABLE = "TESTS_ORDER"
PACE_SECONDS = 0.01
"""Of one run: time to kill a worker midway."""

_SCHEMA = """
    PRAGMA journal_mode=WAL;
    CREATE TABLE runs (
        place INTEGER PRIMARY KEY, queue TEXT, key TEXT, number INTEGER, pid INTEGER,
        attempt INTEGER, started REAL, ended REAL
    )
"""
_START = """
    INSERT INTO runs (queue, key, number, pid, attempt, started)
    VALUES (?, ?, ?, ?, ?, ?) RETURNING place
"""
_END = "UPDATE runs SET ended = ? WHERE place = ?"
_ALL = "SELECT queue, key, number, pid, attempt, started, ended FROM runs ORDER BY place"


class Run(NamedTuple):
    """One run of the job.

    :ivar started: Unix time.
    :ivar ended: the same, None where it did not end.
    """

    queue: str
    key: str
    number: int
    pid: int
    attempt: int
    started: float
    ended: float | None


class Journal:
    """The runs, as a test reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        database = _opened(str(path))
        database.executescript(_SCHEMA)
        database.close()

    def runs(self) -> list[Run]:
        """Return all runs in the order in which they began."""
        database = _opened(str(self.path))
        try:
            return [Run(*row) for row in database.execute(_ALL)]
        finally:
            database.close()

    def done(self) -> set[int]:
        """Return the numbers of messages of which a run ended."""
        return {run.number for run in self.runs() if run.ended is not None}


def _opened(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=20.0, isolation_level=None)
    database.execute("PRAGMA synchronous=OFF")
    return database


app = App("journal")


@app.context
def journal() -> Iterator[dict[str, Any]]:
    """Yield a context that holds the open database."""
    database = _opened(os.environ[PATH_VARIABLE])
    try:
        yield {"database": database}
    finally:
        database.close()


@app.job(order="none" if os.environ.get(ORDER_VARIABLE) == "none" else "queue")
def job(message: Message, context: dict[str, Any]) -> None:
    """Write down that the job began, take a moment, and write down that it ended."""
    database, body = context["database"], message.body
    row = message.queue, body["key"], body["number"], os.getpid(), message.attempt, time.time()
    ((place,),) = database.execute(_START, row).fetchall()
    time.sleep(PACE_SECONDS)
    database.execute(_END, (time.time(), place))
