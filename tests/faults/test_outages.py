"""An outage of the broker is not the fault of the messages: no attempt counts, in any order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
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


CONNECT_SECONDS = 2
FREEZE_SECONDS = 4.0


def freeze_for_a_while(server: PostgresqlServer) -> None:
    """Longer than clients wait, and by a thread: the worker's question blocks this one."""
    server.freeze()
    threading.Timer(FREEZE_SECONDS, server.thaw).start()


Servers = PostgresqlServer
OUTAGES: dict[str, tuple[Callable[[Servers], object], Callable[[Servers], object]]] = {
    "stop": (lambda server: server.stop("immediate"), lambda server: server.start()),
    # Its answer to the worker's question comes after the outage.
    "frozen": (freeze_for_a_while, lambda server: None),
    # It is over before the worker asks.
    "restart": (lambda server: server.restart("immediate"), lambda server: None),
}


@pytest.mark.parametrize(
    ("outage", "order"),
    [("stop", "queue"), ("stop", "key"), ("stop", "none"), ("frozen", "key"), ("restart", "key")],
)
def test_no_attempt_counts_while_the_broker_is_away(
    outage: str,
    order: Any,
    database: PostgresqlDatabase,
    postgresql_server: PostgresqlServer,
    tmp_path: Path,
) -> None:
    """The job uses the same server, and each message has one attempt."""
    begin, end = OUTAGES[outage]
    failed: list[Any] = []
    done: set[tuple[str, Any]] = set()
    setup = EngineSetup(tmp_path, broker=database.url(), attempts=1)

    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(database.conninfo(), connect_timeout=CONNECT_SECONDS)

    def job(message: Message, context: Any) -> None:
        try:
            with connect() as connection:
                connection.execute("SELECT 1")
                if outage != "frozen":
                    begin_once()
                    connection.execute("SELECT 1")
            if outage == "frozen":
                begin_once()
                connect().close()
        except psycopg.Error:
            failed.append(message.body)
            raise
        done.add((message.queue, message.body))

    first = iter((True,))

    def begin_once() -> None:
        if next(first, False):
            begin(postgresql_server)

    least = 5 if outage == "stop" and order != "queue" else 1
    with contextlib.closing(setup):
        setup.app.job("*", order=order)(job)
        for queue in QUEUES:
            for number in range(COUNT):
                setup.app.send(queue, number, key=f"k{number % 3}")
        setup.start(*QUEUES)
        until(lambda: len(failed) >= least, "attempts failed")
        end(postgresql_server)
        until(lambda: len(done) == len(QUEUES) * COUNT, "all messages are done")
        assert setup.broker.dead_letters.counts() == {}
        assert setup.pipeline.counters.retried == 0
