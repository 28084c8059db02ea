"""The job that every program in a comparison runs, and its reports.

Environment variables configure it, so that any worker program can import the module:

- ``BENCH_MODE``: ``count`` (a no-op job; report when the first and the last one ran) or
  ``time`` (report how long each message took from its sender to its job).
- ``BENCH_TOTAL``: number of jobs of a complete run.
- ``BENCH_REPORT``: named pipe that receives one line of JSON once the run is complete.

Times are CLOCK_MONOTONIC nanoseconds, one clock for all processes of a machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

BODY_BYTES = 100
WARM_UP = 20
"""Samples dropped at the start of a latency run, because of connections and first imports."""

_now = time.monotonic_ns


def body(number: int) -> dict[str, Any]:
    """Return a body whose compact JSON has `BODY_BYTES` bytes."""
    value: dict[str, Any] = {"number": number, "name": "Ada Lovelace", "paid": True, "pad": ""}
    size = len(json.dumps(value, separators=(",", ":")))
    value["pad"] = "x" * (BODY_BYTES - size)
    return value


def encoded(number: int) -> bytes:
    """Return the compact JSON of `body(number)`."""
    return json.dumps(body(number), separators=(",", ":")).encode()


def queue_name(number: int) -> str:
    """Return the name of one of the compared queues."""
    return f"bench-{number:02d}"


def set_member(number: int) -> str:
    """Return the name of one of the assigned queues: 32 characters, like a uuid4 in hex."""
    return hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()


def report(path: str, value: dict[str, Any]) -> None:
    """Write one line into the named pipe at `path`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "w") as pipe:
        pipe.write(json.dumps(value) + "\n")


def counting(total: int, done: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """Return a no-op job that calls `done` with the time from the first to the last of `total`."""
    # One C call that is atomic under the interpreter lock: worker threads share it.
    number = itertools.count(1).__next__
    first = first_cpu = 0

    def job(_: Any) -> None:
        nonlocal first, first_cpu
        reached = number()
        if reached == 1:
            first, first_cpu = _now(), time.process_time_ns()
        elif reached == total:
            seconds = (_now() - first) / 1e9
            cpu = (time.process_time_ns() - first_cpu) / 1e9
            done({"jobs": total, "seconds": seconds, "cpu_seconds": cpu})

    return job


def timing(total: int, done: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """Return a job that calls `done` with the ages in seconds of `total` messages.

    One message precedes them: its job calls `done` to report that the worker is ready.
    """
    ages: list[float] = []
    ready = False

    def job(value: Any) -> None:
        nonlocal ready
        age = (_now() - value["sent"]) / 1e9
        if not ready:
            ready = True
            done({"ready": True})
            return
        ages.append(age)
        if len(ages) == total:
            done({"jobs": total, "ages": ages[WARM_UP:]})

    return job


def from_environment() -> Callable[[Any], None]:
    """Return the job that the environment configures."""
    total = int(os.environ["BENCH_TOTAL"])
    path = os.environ["BENCH_REPORT"]
    make = {"count": counting, "time": timing}[os.environ["BENCH_MODE"]]
    return make(total, lambda value: report(path, value))


def pauses(count: int, seed: int = 1) -> Iterator[float]:
    """Yield `count` random pauses in seconds, 5 to 50 ms, the same for every program."""
    chance = random.Random(seed)
    for _ in range(count):
        yield chance.uniform(0.005, 0.050)


def stamped(number: int) -> dict[str, Any]:
    """Return a body with the present time, for a message that is sent immediately."""
    return {**body(number), "sent": _now()}


def send_paced(send: Callable[[dict[str, Any]], object], count: int) -> None:
    """Call `send` with `count` stamped bodies at random intervals."""
    for number, pause in enumerate(pauses(count)):
        time.sleep(pause)
        send(stamped(number))
