"""arq on Redis: ``arq bench.peers.with_arq.WorkerSettings`` is the worker."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from arq import create_pool, func
from arq.connections import RedisSettings

from bench.peers import common as tally

settings = RedisSettings.from_dsn(os.environ["BENCH_REDIS"])
run = tally.from_environment()


async def job(context: dict[str, Any], value: dict[str, Any]) -> None:
    run(value)


class WorkerSettings:
    """The settings of ``arq``, with the default ``poll_delay`` of half a second."""

    functions = (func(job, name="job", keep_result=0),)
    redis_settings = settings


async def main(command: str, count: int) -> None:
    """Send to the queue with pauses (``send``)."""
    if command != "send":
        raise SystemExit(f"unknown command {command!r}")
    pool = await create_pool(settings)
    for number, pause in enumerate(tally.pauses(count)):
        await asyncio.sleep(pause)
        await pool.enqueue_job("job", tally.stamped(number))
    await pool.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
