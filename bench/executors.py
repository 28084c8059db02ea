"""The cost of each executor per message, with a no-op job called as the pipeline calls it.

    python -m bench.executors [--messages N] [--runs N]

All executors alternate in one process and one run. With one queue, each message waits for the
previous one, which shows the cost of order. With eight queues, it shows the throughput of the
process. The best run counts.
"""

from __future__ import annotations

import argparse
import sys
import time

from gevent import monkey

monkey.patch_all()

import gevent  # noqa: E402

from bench.apps.executors import app  # noqa: E402
from bench.support import report  # noqa: E402
from bench.support.statistics import Spread  # noqa: E402
from qdo.message import Message  # noqa: E402
from qdo.settings.settings import Settings  # noqa: E402
from qdo.worker.executors.base import JobCall  # noqa: E402
from qdo.worker.executors.router import ExecutorRouter  # noqa: E402

NAMES = ("greenlet", "timed", "asyncio", "thread", "process")
QUEUES = (1, 8)
BODY = {"tenant": "0123456789abcdef", "number": 12345, "text": "x" * 60}


def turn(call: JobCall, name: str, messages: int) -> None:
    """Run messages of one queue, one after the other."""
    for position in range(messages):
        call(Message(name, position, BODY, None, {}, 1, 1, 1), None)


def microseconds(call: JobCall, name: str, queues: int, messages: int) -> float:
    """Return the time per message with a number of concurrent queues."""
    each = messages // queues
    start = time.perf_counter()
    gevent.joinall([gevent.spawn(turn, call, name, each) for _ in range(queues)], raise_error=True)
    return 1e6 * (time.perf_counter() - start) / (each * queues)


def main() -> int:
    """Measure, print a table and write the JSON; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    executors = ExecutorRouter(
        Settings(app=app.name), "bench.apps.executors:app", lambda message: True
    )
    executors.check(app.jobs)
    calls: dict[str, JobCall] = {}
    for name in NAMES:
        job = app.job_for(name)
        assert job is not None
        calls[name] = executors.bind(job)
        microseconds(calls[name], name, max(QUEUES), 80)  # starts threads and processes
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(given.runs):
        report.say(f"run {number + 1} of {given.runs}")
        for name in NAMES:
            for queues in QUEUES:
                cost = microseconds(calls[name], name, queues, given.messages)
                found.setdefault((name, queues), []).append(cost)
    executors.close()
    spreads = {place: Spread.of_costs(costs) for place, costs in found.items()}
    rows = [[name, *(f"{spreads[name, queues].best:.1f}" for queues in QUEUES)] for name in NAMES]
    header = ["executor", *(f"us per message, {queues} queues" for queues in QUEUES)]
    print(report.table(header, rows))
    result = {
        "machine": report.machine(),
        "versions": report.versions(["gevent", "greenlet"]),
        "messages": given.messages,
        "microseconds": {
            f"{name}, {queues} queues": spreads[name, queues] for name, queues in found
        },
    }
    return report.finish("executors", result, [])


if __name__ == "__main__":
    sys.exit(main())
