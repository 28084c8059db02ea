"""Dramatiq on PostgreSQL: ``dramatiq bench.peers.with_dramatiq_pg`` is the worker."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import dramatiq
import psycopg2
from dramatiq_pg import PostgresBroker
from dramatiq_pg.schema import generate_init_sql

from bench.peers import common as tally

URL = os.environ["BENCH_POSTGRESQL"]

dramatiq.set_broker(PostgresBroker(url=URL, results=False))
run = tally.from_environment() if "BENCH_MODE" in os.environ else None
_lock = threading.Lock()


@dramatiq.actor(queue_name="bench")
def job(value: dict[str, Any]) -> None:
    """Run the compared job, in one thread at a time."""
    if run is None:
        raise RuntimeError("BENCH_MODE is not set")
    with _lock:
        run(value)


def send(values: Sequence[dict[str, Any]]) -> None:
    """Send messages, each in its own transaction."""
    for value in values:
        job.send(value)


def main(command: str, count: int) -> None:
    """Create the schema (``schema``), or send: ``fill``, ``send`` with pauses, or ``blast``."""
    if command == "schema":
        connection = psycopg2.connect(URL)
        with connection, connection.cursor() as cursor:
            cursor.execute(generate_init_sql())
        connection.close()
    elif command == "fill":
        send([tally.body(number) for number in range(count)])
    elif command == "blast":
        tally.send_for(send, count)
    else:
        tally.send_paced(lambda value: send([value]), count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
