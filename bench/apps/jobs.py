"""The apps of `bench.jobs`: a keyed queue with jobs that wait, no-op batches, state by key."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from typing import Any

import qdo
from bench.peers import common as tally
from qdo.state import KeyedState

JOB_SECONDS = 0.010
KEYS = 100
BATCH = 500

keyed = qdo.App("bench")
batched = qdo.App("bench")
idle = qdo.App("bench")
stateful = qdo.App("bench")
run = tally.from_environment()
states = KeyedState()
own = threading.local()
DATABASE = os.environ.get("BENCH_STATES", "")
"""The URL of a PostgreSQL database, or the path of a SQLite file."""


@keyed.job(order="key", concurrency=KEYS)
def wait(message: qdo.Message, context: Any) -> None:
    """Wait as for a service, then count."""
    time.sleep(JOB_SECONDS)
    run(message.body)


@batched.job(batch=BATCH)
def count(batch: qdo.Batch, context: Any) -> None:
    """Count each message, like the bare loop."""
    for message in batch:
        run(message.body)


@idle.job()
def nothing(message: qdo.Message, context: Any) -> None:
    """Count a message."""
    run(message.body)


def connection() -> Any:
    """Return the connection of this thread."""
    if not hasattr(own, "connection"):
        if DATABASE.startswith("postgresql:"):
            import psycopg

            own.connection = psycopg.connect(DATABASE, autocommit=True)
        else:
            own.connection = sqlite3.connect(DATABASE)
            own.connection.execute("PRAGMA journal_mode = WAL")
    return own.connection


@stateful.job(executor="thread" if DATABASE.startswith("postgresql:") else "greenlet")
def add(message: qdo.Message, context: Any) -> None:
    """Count the message in the state of its queue, then as the others do."""
    db = connection()
    transaction = db.transaction() if DATABASE.startswith("postgresql:") else db
    with transaction, states.of(db, message) as state:
        if state.new:
            state["count"] = state.get("count", 0) + 1
    run(message.body)
