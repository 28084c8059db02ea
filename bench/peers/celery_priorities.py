"""Celery on Redis with priorities: an urgent task is sent while one of many waiting ones runs."""

from __future__ import annotations

import json
import os
import sys
import time

from celery import Celery

app = Celery("bench", broker=os.environ["BENCH_REDIS"])
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = int(os.environ["BENCH_PREFETCH"])
app.conf.task_acks_late = True
app.conf.broker_transport_options = {"queue_order_strategy": "priority"}
begun: list[float] = []


@app.task(name="job")  # type: ignore[untyped-decorator]
def job(urgent: bool = False) -> None:
    begun.append(time.monotonic())
    if urgent:
        seconds = begun[-1] - begun[-2] - float(os.environ["BENCH_JOB_SECONDS"])
        with open(os.environ["BENCH_REPORT"], "w") as report:
            report.write(json.dumps({"passed": len(begun) - 11, "seconds": seconds}) + "\n")
    elif len(begun) == 10:
        job.apply_async((True,), priority=0)
    time.sleep(float(os.environ["BENCH_JOB_SECONDS"]))


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        job.apply_async(priority=6)
