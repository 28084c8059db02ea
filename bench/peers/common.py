"""The job that every program in a comparison runs, and its reports.

Environment variables configure it, so that any worker program can import the module:

- ``BENCH_MODE``: ``count`` (a no-op job; report when the first and the last one ran), ``time``
  (report how long each message took from its sender to its job), ``tally`` (a no-op job; several
  processes count) or ``order`` (the same, and count messages that start after a later one of their
  key).
- ``BENCH_TOTAL``: number of jobs of a complete run, for ``count`` and ``time``.
- ``BENCH_REPORT``: named pipe that receives one line of JSON once the run is complete, likewise.
- ``BENCH_READY``: number of messages that precede a run with ``time``; 1 by default.
- ``BENCH_TALLIES``: folder for the counts of ``tally`` and ``order``, a file for each process.

Times are CLOCK_MONOTONIC nanoseconds, one clock for all processes of a machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BODY_BYTES = 100
WARM_UP = 20
"""Samples dropped at the start of a latency run, because of connections and first imports."""
BATCH = 1000
"""Messages of a batch, where a program can send many at once."""
KEYS = 100
"""Keys of the messages whose order counts: message `n` has key `n` modulo this."""

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


def timing(
    total: int, done: Callable[[dict[str, Any]], None], ready: int = 1
) -> Callable[[Any], None]:
    """Return a job that calls `done` with the ages in seconds of `total` messages.

    `ready` messages precede them: the last one's job calls `done` to report that the worker is
    ready.
    """
    ages: list[float] = []
    waiting = ready

    def job(value: Any) -> None:
        nonlocal waiting
        age = (_now() - value["sent"]) / 1e9
        if waiting:
            waiting -= 1
            if not waiting:
                done({"ready": True})
            return
        ages.append(age)
        if len(ages) == total:
            done({"jobs": total, "ages": ages[WARM_UP:]})

    return job


def tallying(folder: Path, ordered: bool = False) -> Callable[[Any], None]:
    """Return a no-op job that counts in shared memory; see `tallies`.

    Not for several threads at once.

    :param ordered: count messages that start after a later one of their key, too.
    """
    path = folder / str(os.getpid())
    path.write_bytes(bytes(16))
    with path.open("r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    number = itertools.count(1).__next__
    last = [-1] * KEYS

    def job(_: Any) -> None:
        counts[0] = number()

    def ordered_job(value: Any) -> None:
        at = value["number"]
        if at < last[at % KEYS]:
            counts[1] += 1
        last[at % KEYS] = at
        counts[0] = number()

    return ordered_job if ordered else job


def tallies(folder: Path) -> tuple[int, int]:
    """Return the jobs of all processes so far, and those out of order."""
    found = [memoryview(path.read_bytes()).cast("q") for path in folder.iterdir()]
    whole = [each for each in found if len(each) == 2]  # a process may be creating its file
    return sum(each[0] for each in whole), sum(each[1] for each in whole)


def from_environment() -> Callable[[Any], None]:
    """Return the job that the environment configures."""
    mode = os.environ["BENCH_MODE"]
    if mode in ("tally", "order"):
        return tallying(Path(os.environ["BENCH_TALLIES"]), mode == "order")
    total = int(os.environ["BENCH_TOTAL"])
    path = os.environ["BENCH_REPORT"]

    def done(value: dict[str, Any]) -> None:
        report(path, value)

    if mode == "time":
        return timing(total, done, int(os.environ.get("BENCH_READY", "1")))
    return {"count": counting}[mode](total, done)


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


def send_for(
    send: Callable[[Sequence[dict[str, Any]]], object], batch: int, threads: int = 1
) -> None:
    """Call `send` with batches for as long as requested, beside other senders.

    Prints a line when it is ready, reads the seconds, and prints the messages per second. Then
    waits for its end, with its connections, whose costs at the server are being read.
    """
    bodies = [body(number) for number in range(batch)]
    send(bodies)  # connects, and loads what it needs
    print("ready", flush=True)
    seconds = float(sys.stdin.readline())
    rates: list[float] = []

    def keep_sending() -> None:
        began = time.monotonic()
        sent, passed = 0, 0.0
        while passed < seconds:
            send(bodies)
            sent += batch
            passed = time.monotonic() - began
        rates.append(sent / passed)

    running = [threading.Thread(target=keep_sending) for _ in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    print(json.dumps({"rate": sum(rates)}), flush=True)
    sys.stdin.readline()


def batches(count: int, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield `count` bodies in lists of up to `size`."""
    for start in range(0, count, size):
        yield [body(number) for number in range(start, min(count, start + size))]
