"""What a history costs: runs of the worker engine with and without one, in turn.

    python -m bench.history [--messages N] [--queues N] [--rounds N]

Processor time of the whole process counts, with the thread that writes to a SQLite file: it varies
less than the rate on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.throughput_profile import FETCH, TURN_SECONDS, engine, fill
from qdo.brokers.base import Broker
from qdo.brokers.registry import open_broker
from qdo.coordination.protocol.claims import DRAINED
from qdo.history.recorder import OwnerRows
from qdo.settings.settings import Settings


def cost(broker: Broker, queues: list[str], messages: int, history: str) -> float:
    """Return the processor time of a message in microseconds."""
    settings = Settings(app="bench", fetch=FETCH, turn_seconds=TURN_SECONDS, history=history)
    began = time.process_time()
    engine(broker, queues, messages, settings)
    return (time.process_time() - began) * 1e6 / messages


def owners_cost(queues: int) -> float:
    """Return the processor time of the event loop in ms for claims and ends of queues."""
    names = [f"queue-{number:05d}" for number in range(queues)]
    times = []
    for _ in range(10):
        rows = OwnerRows()
        began = time.process_time()
        for fence, name in enumerate(names):
            rows.claimed(name, fence, "worker-0000000001")
        for fence, name in enumerate(names):
            rows.ended(name, fence, DRAINED)
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times)


def main() -> int:
    """Print the median of each, and the difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    queues = [f"queue-{number:03d}" for number in range(options.queues)]
    with tempfile.TemporaryDirectory() as folder:
        broker = open_broker(f"sqlite:{Path(folder) / 'messages.db'}", "bench")
        fill(broker, queues, options.messages)
        address = f"sqlite:{Path(folder) / 'history.db'}"
        pairs = [
            tuple(cost(broker, queues, options.messages, each) for each in ("", address))
            for _ in range(options.rounds + 1)
        ][1:]  # the first pays for imports
        broker.close()
    without, with_one = (statistics.median(each) for each in zip(*pairs, strict=True))
    difference = statistics.median(after - before for before, after in pairs)
    print(f"without a history {without:8.3f} us for each message")
    print(f"with a history    {with_one:8.3f} us")
    print(f"difference        {difference:8.3f} us, {difference * 10:.1f} % at 100,000 messages/s")
    print(f"owners            {owners_cost(10_000):8.3f} ms for claims and ends of 10,000 queues")
    return 0


if __name__ == "__main__":
    sys.exit(main())
