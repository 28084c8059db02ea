"""Taskiq on Redis: ``taskiq worker bench.peers.with_taskiq:broker`` is the worker."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from taskiq_redis import ListQueueBroker

from bench.peers import common as tally

broker = ListQueueBroker(url=os.environ["BENCH_REDIS"], queue_name="bench")
run = tally.from_environment()


async def _job(value: dict[str, Any]) -> None:
    run(value)


job = broker.task(task_name="job")(_job)


async def main(command: str, count: int) -> None:
    """Send to the queue with pauses (``send``)."""
    if command != "send":
        raise SystemExit(f"unknown command {command!r}")
    await broker.startup()
    for number, pause in enumerate(tally.pauses(count)):
        await asyncio.sleep(pause)
        await job.kiq(tally.stamped(number))
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
