"""Procrastinate: ``procrastinate --app bench.peers.with_procrastinate.app worker`` is the worker.

``BENCH_LOCKS=1`` gives each message the lock of its key.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

from bench.peers import common as tally

app = App(connector=PsycopgConnector(conninfo=os.environ["BENCH_POSTGRESQL"], max_size=20))
run = tally.from_environment() if "BENCH_MODE" in os.environ else None


@app.task(name="job")
async def job(value: dict[str, Any]) -> None:
    """Run the compared job."""
    if run is None:
        raise RuntimeError("BENCH_MODE is not set")
    run(value)


def send(values: Sequence[dict[str, Any]]) -> None:
    """Send messages with one statement."""
    if os.environ.get("BENCH_LOCKS") == "1":
        for value in values:
            job.configure(lock=f"key-{value['number'] % tally.KEYS}").defer(value=value)
    elif len(values) == 1:
        job.defer(value=values[0])
    else:
        job.batch_defer(*({"value": value} for value in values))


def main(command: str, count: int) -> None:
    """Create the schema (``schema``), or send: ``fill``, ``send`` with pauses, or ``blast``."""
    connector = SyncPsycopgConnector(conninfo=os.environ["BENCH_POSTGRESQL"], min_size=1)
    with app.replace_connector(connector) as sender, sender.open():
        if command == "schema":
            sender.schema_manager.apply_schema()
        elif command == "fill":
            for values in tally.batches(count, tally.BATCH):
                send(values)
        elif command == "blast":
            tally.send_for(send, count)
        else:
            tally.send_paced(lambda value: send([value]), count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
