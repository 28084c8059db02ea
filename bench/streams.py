"""Streams, and their splits: ``python -m bench.streams``.

What does a key cost a sender, beside a plain send? How long does a split take while 50 threads of
five processes send and a million messages wait, and how long does a sender wait then? How soon
after the last checkpoint of a parent do its children begin? How long does `Stream.owner` take?
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.support import report
from bench.support.postgresql_runs import postgresql
from bench.support.processes import Program
from bench.support.statistics import Goal
from qdo import App
from qdo.brokers.streams import split
from qdo.coordination.bulk_reads import read_nodes
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.sending.streams import Stream
from tests.support.postgresql.schema import prepared

KEYS = [f"key {number}" for number in range(1000)]
SENDERS, THREADS = 5, 10
WORKER = """
import qdo

app = qdo.App("rounds")


@app.job("user.*", order="key")
def note(message, context):
    pass
"""


def per_message(send: Callable[[], object], count: int) -> float:
    """Return the microseconds of a message, the best of five rounds of `count` messages."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        send()
        best = min(best, time.perf_counter() - began)
    return 1e6 * best / count


def costs(app: App, stream: Stream) -> dict[str, float]:
    """Compare sends to queues and to a stream of as many shards, in batches and one by one."""
    names = [f"plain-{number % 8}" for number in range(len(KEYS))]
    plain = [(name, 1, key) for name, key in zip(names, KEYS, strict=True)]
    keyed = [(key, 1) for key in KEYS]
    return {
        "plain, us": per_message(lambda: app.send_many(plain), len(KEYS)),
        "stream, us": per_message(lambda: stream.send_many(keyed), len(KEYS)),
        "plain one by one, us": per_message(lambda: [app.send(*each) for each in plain[:200]], 200),
        "stream one by one, us": per_message(
            lambda: [stream.send(*each) for each in keyed[:200]], 200
        ),
    }


def send_for(address: str, seconds: float) -> None:
    """Send with several threads; print when each send began and ended, by shard."""
    found: list[tuple[str, float, float]] = []
    with App("bench", broker=address) as app:
        stream = app.stream("user", shards=8)
        stream.send(KEYS[0], 1)
        print("ready", flush=True)

        def run(number: int) -> None:
            key, until = KEYS[number], time.time() + seconds
            queue = stream.queue(key)
            while (began := time.time()) < until:
                stream.send(key, 1)
                found.append((queue, began, time.time()))

        threads = [threading.Thread(target=run, args=(each,)) for each in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps(found), flush=True)


def divide(app: App, stream: Stream, address: str, waiting: int, seconds: float) -> dict[str, Any]:
    """Split a shard with a backlog while others send; return how long all that takes."""
    parent, broker = stream.queue(KEYS[0]), app.broker
    mine = [key for key in KEYS if stream._queue_of(key) == parent]
    for start in range(0, waiting, 10_000):
        stream.send_many([(mine[each % len(mine)], each) for each in range(start, start + 10_000)])
    argv = [sys.executable, "-m", "bench.streams", "--sender", address, "--seconds", str(seconds)]
    senders = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(SENDERS)]
    for sender in senders:
        assert sender.stdout is not None
        sender.stdout.readline()
    time.sleep(seconds / 2)
    children = split(broker.streams.shards("user"), parent)
    began = time.time()
    broker.streams.add(children)
    sealed = time.time()
    sends = [each for sender in senders for each in json.loads(sender.communicate()[0])]
    calm = [end - begin for _, begin, end in sends if not began - 0.5 < end < sealed + 0.5]
    around = [(queue, end - begin) for queue, begin, end in sends if begin < sealed and end > began]
    return {
        "split with a million waiting, ms": 1e3 * (sealed - began),
        "sends/s": len(sends) / seconds,
        "median send, ms": 1e3 * statistics.median(calm),
        "99 % of sends, ms": 1e3 * statistics.quantiles(calm, n=100)[98],
        "longest send at the split, ms": 1e3 * max(each for _, each in around),
        "the same to other shards, ms": 1e3
        * max((each for queue, each in around if queue != parent), default=0.0),
    }


class Rounds:
    """Splits of an app with a worker, which a client of its coordinator looks at."""

    def __init__(self, app: App, folder: Path, client: Client) -> None:
        self._app, self._client, self._layout = app, client, Layout.of(app.name)
        self._stream = app.stream("user", shards=4)
        (folder / "note.py").write_text(WORKER)

    def play(self, number: int) -> tuple[float, float]:
        """Return the seconds from a split to the record of the child's message, and of `owner`."""
        key, streams = f"round {number}", self._app.broker.streams
        parent = self._stream.queue(key)
        self._stream.send(key, 1)
        head = self._app.broker.catalog.head(parent)
        self._until_recorded(parent, head)
        streams.add(split(streams.shards("user"), parent))
        began = time.monotonic()
        self._stream.send(key, 2)
        self._until_recorded(self._stream.queue(key), 1)
        waited, began = time.monotonic() - began, time.perf_counter()
        self._stream.owner(key)
        return waited, time.perf_counter() - began

    def _until_recorded(self, queue: str, position: int) -> None:
        limit = time.monotonic() + 60
        while True:
            found = read_nodes(self._client, [self._layout.queue(queue)])
            if found and QueueNode.parse(found[0].data).last >= position:
                return
            if time.monotonic() > limit:
                raise TimeoutError(f"the worker does not reach {position} in {queue}")
            time.sleep(0.005)


def beginnings(app: App, folder: Path, rounds: int) -> dict[str, float]:
    """Return how long after the end of a parent its child begins, and how long `owner` takes."""
    coordinator = app.settings.coordinator
    own = {"QDO_BROKER": app.settings.broker, "QDO_COORDINATOR": coordinator}
    argv = [sys.executable, "-c", "import sys; from qdo.__main__ import worker; sys.exit(worker())"]
    options = ["note:app", "--log-level", "error"]
    client = connect(coordinator)
    client.open()
    playing = Rounds(app, folder, client)
    with Program([*argv, *options], environment=own, folder=folder):
        waits, owners = zip(*map(playing.play, range(rounds)), strict=True)
    client.stop()
    client.close()
    return {
        "a child begins after, median s": statistics.median(waits),
        "a child begins after, longest s": max(waits),
        "owner, ms": 1e3 * statistics.median(owners),
    }


def figures(address: str, folder: Path, quick: bool) -> dict[str, Any]:
    coordinator = f"sqlite:{folder}/coordination.db"
    with App("bench", broker=address, coordinator=coordinator) as app:
        stream = app.stream("user", shards=8)
        found = costs(app, stream)
        waiting, seconds = (10_000, 1.0) if quick else (1_000_000, 6.0)
        found |= divide(app, stream, address, waiting, seconds)
    with App("rounds", broker=address, coordinator=f"sqlite:{folder}/rounds.db") as app:
        found |= beginnings(app, folder, 3 if quick else 20)
    return found


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--sender", metavar="BROKER", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sender:
        send_for(given.sender, given.seconds)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        server = stack.enter_context(postgresql()).address
        places = {
            "SQLite": f"sqlite:{name}/messages.db",
            "PostgreSQL": prepared(server.url(server.create_database())),
        }
        found = {}
        for kind, address in places.items():
            folder = Path(name) / kind
            folder.mkdir()
            found[kind] = figures(address, folder, given.quick)
    names = list(found["SQLite"])
    rows = [(key, *(f"{each[key]:,.2f}" for each in found.values())) for key in names]
    print(report.table(("figure", *found), rows))
    goals = [
        goal
        for kind, each in found.items()
        for goal in (
            Goal.at_most(f"key, {kind}, us", 3, each["stream, us"] - each["plain, us"]),
            Goal.at_most(f"split, {kind}, ms", 50, each["split with a million waiting, ms"]),
            Goal.at_most(f"child, {kind}, s", 1.2, each["a child begins after, longest s"]),
            Goal.at_most(f"owner, {kind}, ms", 3, each["owner, ms"]),
        )
    ]
    return report.finish("streams", {"machine": report.machine(), "figures": found}, goals)


if __name__ == "__main__":
    sys.exit(main())
