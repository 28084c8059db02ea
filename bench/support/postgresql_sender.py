"""qdo's senders on PostgreSQL, with the commands of the other programs in `bench.peers`.

``python -m bench.support.postgresql_sender fill|send|blast|ready|stream|list COUNT``: the
broker is ``BENCH_POSTGRESQL``. ``BENCH_QUEUES`` queues get messages in turn. ``BENCH_KEYED=1``
sends to one queue, by key. A sender of ``blast`` has a queue of its own, or the one in
``BENCH_QUEUE``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import qdo
from bench.peers import common as tally

APP = "bench"
CHUNK = 10_000
QUEUES = int(os.environ.get("BENCH_QUEUES", "1"))
THREADS = int(os.environ.get("BENCH_THREADS", "1"))


def fill(app: qdo.App, count: int) -> None:
    """Send messages in turn to each queue, or by key to one."""
    keyed = os.environ.get("BENCH_KEYED") == "1"
    for values in tally.batches(count, CHUNK):
        if keyed:
            app.send_many(
                (tally.queue_name(0), value, f"key-{value['number'] % tally.KEYS}")
                for value in values
            )
        else:
            app.send_many((tally.queue_name(value["number"] % QUEUES), value) for value in values)


def blast(app: qdo.App, batch: int) -> None:
    """Send to one queue for as long as requested."""
    queue = os.environ.get("BENCH_QUEUE") or f"sender-{os.environ['BENCH_SENDER']}"

    def send(values: Sequence[dict[str, Any]]) -> None:
        if len(values) == 1:
            app.send(queue, values[0])
        else:
            app.send_many((queue, value) for value in values)

    tally.send_for(send, batch, THREADS)


def stream(app: qdo.App, count: int) -> None:
    """Send batches at ``BENCH_PACE`` messages per second."""
    pace = float(os.environ["BENCH_PACE"])
    began = time.monotonic()
    sent = 0
    for values in tally.batches(count, tally.BATCH):
        time.sleep(max(0.0, began + sent / pace - time.monotonic()))
        app.send_many((tally.queue_name(value["number"] % QUEUES), value) for value in values)
        sent += len(values)


def list_queues(app: qdo.App, count: int) -> None:
    """Create `count` queues, and print how long two lists of them take, in seconds."""
    for start in range(0, count, CHUNK):
        names = range(start, min(count, start + CHUNK))
        app.send_many((tally.set_member(number), None) for number in names)
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        found = len(app.broker.catalog.names())
        seconds.append(time.monotonic() - began)
        if found != count:
            raise RuntimeError(f"{found:,} of {count:,} queues are listed")
    print(json.dumps({"queues": count, "first": seconds[0], "next": seconds[1]}), flush=True)


COMMANDS = {"fill": fill, "blast": blast, "stream": stream, "list": list_queues}


def main(command: str, count: int) -> None:
    """Run a command; ``ready`` sends one message to each queue, ``send`` sends with pauses."""
    names = [tally.queue_name(number) for number in range(QUEUES)]
    with qdo.App(APP, broker=os.environ["BENCH_POSTGRESQL"]) as app:
        if command in COMMANDS:
            COMMANDS[command](app, count)
        elif command == "ready":
            app.send_many((name, tally.stamped(0)) for name in names)
        else:
            turns = _turns(names)
            tally.send_paced(lambda value: app.send(next(turns), value), count)


def _turns(names: Sequence[str]) -> Iterator[str]:
    while True:
        yield from names


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
