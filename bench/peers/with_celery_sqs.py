"""Celery on SQS: ``celery -A bench.peers.with_celery_sqs worker`` is the worker."""

from __future__ import annotations

import os
import sys

from celery import Celery

from bench.peers import common as tally

endpoint = os.environ["BENCH_SQS"].removeprefix("http://")

app = Celery("bench", broker=f"sqs://testing:testing@{endpoint}")
app.conf.broker_transport_options = {
    "region": "us-east-1",
    "is_secure": False,
    "queue_name_prefix": os.environ["BENCH_PREFIX"],
    # Long polls take the default of 10 s. At its prefetch limit it also pauses.
    "polling_interval": float(os.environ.get("BENCH_PAUSE", "1")),
}
app.conf.task_ignore_result = True
app.conf.worker_enable_remote_control = False
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = int(os.environ.get("BENCH_PREFETCH", "4"))

job = app.task(tally.from_environment(), name="job")


def main(command: str, count: int) -> None:
    """Fill the first queue (``fill``)."""
    if command != "fill":
        raise SystemExit(f"unknown command {command!r}")
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(count):
            job.apply_async((tally.body(number),), queue=tally.queue_name(0), producer=producer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
