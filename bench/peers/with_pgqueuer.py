"""PgQueuer: ``python -m bench.peers.with_pgqueuer worker BATCH`` is the worker.

It does what ``pgq run`` does, which fails with the newest typer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import asyncpg
import psycopg
import ujson
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, SyncPsycopgDriver
from pgqueuer.models import Job
from pgqueuer.queries import SyncQueries

from bench.peers import common as tally

URL = os.environ["BENCH_POSTGRESQL"]


async def worker(batch: int) -> None:
    """Work until the process ends."""
    manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(URL)))
    run = tally.from_environment()

    @manager.entrypoint("job")
    async def job(job: Job) -> None:
        """Run the compared job."""
        run(ujson.loads(job.payload or b""))

    await manager.run(batch_size=batch)


def main(command: str, count: int) -> None:
    """Work (``worker``), or send: ``fill``, ``send`` with pauses, or ``blast``."""
    if command == "worker":
        uvloop.run(worker(count))
        return
    with psycopg.connect(URL, autocommit=True) as connection:
        queries = SyncQueries(SyncPsycopgDriver(connection))

        def send(values: Sequence[dict[str, Any]]) -> None:
            payloads: list[bytes | None] = [ujson.dumps(value).encode() for value in values]
            queries.enqueue(["job"] * len(values), payloads, [0] * len(values))

        if command == "fill":
            for values in tally.batches(count, tally.BATCH):
                send(values)
        elif command == "blast":
            tally.send_for(send, count)
        else:
            tally.send_paced(lambda value: send([value]), count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
