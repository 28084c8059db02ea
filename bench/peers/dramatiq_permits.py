"""Dramatiq's limiter on Redis: ``python -m bench.peers.dramatiq_permits MOST SECONDS``.

Prints how many jobs four threads ran. The limiter has no queue: a job without a permit tries again
after a millisecond. In Dramatiq itself the message would be sent again, with a backoff.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

THREADS = 4
JOB_SECONDS = 0.002
PAUSE_SECONDS = 0.001


def main(most: int, seconds: float) -> None:
    """Run the jobs, and print their number."""
    limiter = ConcurrentRateLimiter(
        RedisBackend(url=os.environ["BENCH_REDIS"]), f"most-{most}", limit=most
    )
    counts = [0] * THREADS
    begin = threading.Barrier(THREADS)

    def run(number: int) -> None:
        with limiter.acquire(raise_on_failure=False):
            pass  # the first permit opens the connection
        begin.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            with limiter.acquire(raise_on_failure=False) as acquired:
                if acquired:
                    time.sleep(JOB_SECONDS)
                    counts[number] += 1
            if not acquired:
                time.sleep(PAUSE_SECONDS)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
