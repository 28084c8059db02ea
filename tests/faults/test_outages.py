"""An outage of the broker is not the fault of the messages: no attempt counts, in any order."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psycopg
import pytest

from qdo import Message
from tests.support.engine import EngineSetup, until
from tests.support.postgresql.server import PostgresqlDatabase, PostgresqlServer

QUEUES = ("a", "b")
"""Too few for a pause of the job."""
COUNT = 12


@pytest.mark.parametrize("order", ["queue", "key", "none"])
def test_no_attempt_counts_while_the_broker_is_away(
    order: Any, database: PostgresqlDatabase, postgresql_server: PostgresqlServer, tmp_path: Path
) -> None:
    """The job uses the same server, and each message has one attempt."""
    failed: list[Any] = []
    done: set[tuple[str, Any]] = set()
    setup = EngineSetup(tmp_path, broker=database.url(), attempts=1)

    def job(message: Message, context: Any) -> None:
        try:
            with psycopg.connect(database.conninfo()) as connection:
                connection.execute("SELECT 1")
                stop_once()
                connection.execute("SELECT 1")
        except psycopg.Error:
            failed.append(message.body)
            raise
        done.add((message.queue, message.body))

    stops = iter((True,))

    def stop_once() -> None:
        if next(stops, False):
            postgresql_server.stop("immediate")

    with contextlib.closing(setup):
        setup.app.job("*", order=order)(job)
        for queue in QUEUES:
            for number in range(COUNT):
                setup.app.send(queue, number, key=f"k{number % 3}")
        setup.start(*QUEUES)
        until(lambda: len(failed) >= (1 if order == "queue" else 5), "attempts failed")
        postgresql_server.start()
        until(lambda: len(done) == len(QUEUES) * COUNT, "all messages are done")
        assert setup.broker.dead_letters.counts() == {}
        assert setup.pipeline.counters.retried == 0
