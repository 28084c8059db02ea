"""Celery on Redis: ``celery -A bench.peers.with_celery worker`` is the worker."""

from __future__ import annotations

import os
import sys

from celery import Celery

from bench.peers import common as tally

QUEUES = int(os.environ.get("BENCH_QUEUES", "1"))

app = Celery("bench", broker=os.environ["BENCH_REDIS"])
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = int(os.environ.get("BENCH_PREFETCH", "4"))

job = app.task(tally.from_environment(), name="job")


def main(command: str, count: int) -> None:
    """Fill the queues (``fill``), or send to the first one with pauses (``send``)."""
    with app.producer_pool.acquire(block=True) as producer:
        if command == "fill":
            for number in range(count):
                queue = tally.queue_name(number % QUEUES)
                job.apply_async((tally.body(number),), queue=queue, producer=producer)
        else:
            tally.send_paced(
                lambda value: job.apply_async(
                    (value,), queue=tally.queue_name(0), producer=producer
                ),
                count,
            )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
