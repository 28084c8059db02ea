"""The embedded broker by itself: ``python -m bench.broker_micro``.

Measures fetching rows, bare and with the least work of a worker; durable sends one by one,
from tests.support.paths import ROOT
from many threads and from several processes; batches; and how soon a listener in another
process wakes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import ujson

from bench.support import report
from bench.support.statistics import Ages, Goal, Spread
from qdo.brokers.base import Broker, Outgoing
from qdo.brokers.registry import open_broker
from tests.support.paths import ROOT

QUEUES = 16
BATCH = 1000
BODY = b'{"name": "%s"}' % (b"x" * 86)
"""100 bytes of JSON."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Sends per second."""

    what: str
    rate: Spread


@dataclass(frozen=True, slots=True)
class Delay:
    """How long."""

    what: str
    ages: Ages


def nothing(value: object) -> None:
    """Stand in for a job."""


def bare(rows: object) -> None:
    """Ignore rows."""


def with_job(rows: list[tuple[int, bytes, str | None, str | None]]) -> None:
    """Decode each body and call a function, as a worker does."""
    loads = ujson.loads
    for _, body, _, _ in rows:
        nothing(loads(body))


def fill(broker: Broker, count: int) -> None:
    """Distribute messages over the queues."""
    part = [Outgoing(f"queue-{number % QUEUES}", BODY) for number in range(10_000)]
    for _ in range(count // len(part)):
        broker.send_many(part)


def fetch_all(broker: Broker, handle: Callable[..., None]) -> float:
    """Fetch all rows from all queues in turn; return rows per second."""
    readers = [broker.reader(name, 0) for name in broker.catalog.names()]
    count = 0
    began = time.perf_counter()
    while readers:
        for reader in list(readers):
            rows = reader.fetch(BATCH)
            if rows:
                handle(rows)
                count += len(rows)
            else:
                readers.remove(reader)
    return count / (time.perf_counter() - began)


def send_from_threads(broker: Broker, threads: int, count: int) -> float:
    """Send one by one from several threads; return messages per second."""

    def send(number: int) -> None:
        message = Outgoing(f"queue-{number % QUEUES}", BODY)
        for _ in range(count // threads):
            broker.send(message)

    senders = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    return count // threads * threads / (time.perf_counter() - began)


def send_batches(broker: Broker, size: int, count: int) -> float:
    """Send in batches; return messages per second."""
    part = [Outgoing(f"queue-{number % QUEUES}", BODY) for number in range(size)]
    began = time.perf_counter()
    for _ in range(count // size):
        broker.send_many(part)
    return count // size * size / (time.perf_counter() - began)


_SENDER = """
import sys, time
from bench.broker_micro import BODY
from qdo.brokers.registry import open_broker
from qdo.brokers.base import Outgoing
broker = open_broker(sys.argv[1], "bench")
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2])):
    began = time.perf_counter()
    broker.send(Outgoing("queue-0", BODY))
    print(time.perf_counter() - began)
"""

_LISTENER = """
import sys, threading, time
if sys.argv[3] == "gevent":
    import gevent.monkey
    gevent.monkey.patch_all()
from qdo.brokers.registry import open_broker
broker = open_broker(sys.argv[1], "bench")
reader = broker.reader("wake", 0)
ages = []
end = threading.Event()
def wake(names):
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    for position, body, key, headers in reader.fetch(1000):
        ages.append(now - float(body))
    if len(ages) >= int(sys.argv[2]):
        end.set()
stop = broker.listen(wake)
print("ready", flush=True)
end.wait(120)
print(*ages, sep="\\n", flush=True)
stop()
broker.close()
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a child process and wait until it is ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if child.stdout is None or child.stdout.readline() != "ready\n":
        raise RuntimeError("a child process of the benchmark did not start")
    return child


def contended_sends(url: str, processes: int, count: int) -> Ages:
    """Send from several processes without pause; return the duration of each send."""
    children = [start(_SENDER, url, str(count)) for _ in range(processes)]
    for child in children:
        if child.stdin is not None:
            child.stdin.write("go\n")
            child.stdin.flush()
    lines = [line for child in children for line in child.communicate()[0].split()]
    return Ages.of_seconds([float(line) for line in lines])


def wake_ups(url: str, count: int, kind: str) -> Ages:
    """Send with pauses to an idle listener in another process; return the send-to-fetch times."""
    child = start(_LISTENER, url, str(count), kind)
    broker = open_broker(url, "bench")
    pause = threading.Event()
    for number in range(count):
        pause.wait(0.002 + 0.001 * (number % 7))
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        broker.send(Outgoing("wake", b"%.9f" % now))
    lines = child.communicate()[0].split()
    broker.close()
    return Ages.of_seconds([float(line) for line in lines])


def rates(folder: str, runs: int, count: int) -> list[Rate]:
    """Measure rates."""
    broker = open_broker(f"sqlite:{folder}/rates.db", "bench")
    fill(broker, count)
    measured: list[tuple[str, Callable[[], float]]] = [
        (f"fetch, {BATCH} rows at a time", lambda: fetch_all(broker, bare)),
        ("fetch, decode, call a function", lambda: fetch_all(broker, with_job)),
        ("send, 1 thread", lambda: send_from_threads(broker, 1, 2_000)),
        ("send, 8 threads", lambda: send_from_threads(broker, 8, 8_000)),
        ("send, 64 threads", lambda: send_from_threads(broker, 64, 16_000)),
        ("send_many, 100 at a time", lambda: send_batches(broker, 100, 20_000)),
        ("send_many, 10,000 at a time", lambda: send_batches(broker, 10_000, 100_000)),
    ]
    found = []
    for what, measure in measured:
        report.say(what)
        found.append(Rate(what, Spread.of_rates([measure() for _ in range(runs)])))
    broker.close()
    return found


def delays(folder: str) -> list[Delay]:
    """Measure latencies."""
    report.say("concurrent sends, and wakeups")

    def url(name: str) -> str:
        return f"sqlite:{folder}/{name}.db"

    return [
        Delay("send, 1 process", contended_sends(url("alone"), 1, 2_000)),
        Delay("send, 4 processes without pause", contended_sends(url("contended"), 4, 1_000)),
        Delay("send to wakeup, threads", wake_ups(url("threads"), 1_000, "threads")),
        Delay("send to wakeup, gevent", wake_ups(url("gevent"), 1_000, "gevent")),
    ]


def main() -> int:
    """Measure, print and write the JSON; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=400_000, help="messages to fetch")
    arguments = parser.parse_args()
    machine = report.machine()
    with tempfile.TemporaryDirectory(prefix="qdo-bench-") as folder:
        speed = rates(folder, arguments.runs, arguments.rows)
        waits = delays(folder)
    print(
        report.table(
            ("messages/s", "best", "median", "worst"),
            [
                (one.what, *(f"{n:,.0f}" for n in (one.rate.best, one.rate.median, one.rate.worst)))
                for one in speed
            ],
        )
    )
    print(
        report.table(
            ("milliseconds", "median", "99 %", "longest"),
            [
                (one.what, *(f"{n:.2f}" for n in (one.ages.median, one.ages.p99, one.ages.longest)))
                for one in waits
            ],
        )
    )
    last = waits[-1].ages
    goals = [
        Goal("send to wakeup, median", "2 ms or less", f"{last.median:.2f} ms", last.median <= 2),
        Goal("send to wakeup, 99 %", "under 10 ms", f"{last.p99:.2f} ms", last.p99 < 10),
    ]
    return report.finish(
        "broker_micro", {"machine": machine, "rates": speed, "delays": waits}, goals
    )


if __name__ == "__main__":
    sys.exit(main())
