"""Celery on PostgreSQL, through SQLAlchemy: ``celery -A bench.peers.with_celery_postgresql``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from celery import Celery

from bench.peers import common as tally

URL = os.environ["BENCH_POSTGRESQL"].replace("postgresql://", "sqla+postgresql+psycopg://")

app = Celery("bench", broker=URL)
app.conf.task_ignore_result = True
app.conf.worker_enable_remote_control = False
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = int(os.environ.get("BENCH_PREFETCH", "4"))
run = tally.from_environment() if "BENCH_MODE" in os.environ else None


@app.task(name="job")
def job(value: dict[str, Any]) -> None:
    """Run the compared job."""
    if run is None:
        raise RuntimeError("BENCH_MODE is not set")
    run(value)


def main(command: str, count: int) -> None:
    """Create the tables (``schema``), or send: ``fill``, ``send`` with pauses, or ``blast``."""
    if command == "schema":  # several senders at once would fail to
        with app.connection_for_write() as connection:
            connection.default_channel.queue_declare(tally.queue_name(0))
        return
    with app.producer_pool.acquire(block=True) as producer:

        def send(values: Sequence[dict[str, Any]]) -> None:
            for value in values:
                job.apply_async((value,), queue=tally.queue_name(0), producer=producer)

        if command == "fill":
            send([tally.body(number) for number in range(count)])
        elif command == "blast":
            tally.send_for(send, count)
        else:
            tally.send_paced(lambda value: send([value]), count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
