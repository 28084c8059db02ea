"""Dramatiq on Redis: ``dramatiq bench.peers.with_dramatiq`` is the worker."""

from __future__ import annotations

import os
import sys

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.peers import common as tally

QUEUES = int(os.environ.get("BENCH_QUEUES", "1"))

broker = RedisBroker(url=os.environ["BENCH_REDIS"])
dramatiq.set_broker(broker)

job = tally.from_environment()
# An actor belongs to one queue, so each queue has an actor with the same function.
actors = [
    dramatiq.actor(job, actor_name=f"job-{number}", queue_name=tally.queue_name(number))
    for number in range(QUEUES)
]


def main(command: str, count: int) -> None:
    """Fill the queues (``fill``), or send to the first one with pauses (``send``)."""
    if command == "fill":
        for number in range(count):
            actors[number % QUEUES].send(tally.body(number))
    else:
        tally.send_paced(actors[0].send, count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
