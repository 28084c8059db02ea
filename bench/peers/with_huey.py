"""Huey on Redis: ``huey_consumer bench.peers.with_huey.huey`` is the worker.

A consumer of Huey reads one queue, so this is one queue instead of many.
"""

from __future__ import annotations

import os
import sys

from huey import RedisHuey

from bench.peers import common as tally

huey = RedisHuey("bench", url=os.environ["BENCH_REDIS"], results=False)
job = huey.task(name="job")(tally.from_environment())


def main(command: str, count: int) -> None:
    """Fill the queue (``fill``), or send to it with pauses (``send``)."""
    if command == "fill":
        for number in range(count):
            job(tally.body(number))
    else:
        tally.send_paced(job, count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
