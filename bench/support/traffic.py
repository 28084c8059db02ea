"""Sends a message to each of many queues, repeatedly, until standard input is closed.

``python -m bench.support.traffic BROKER QUEUES EVERY``: queues are numbered; `EVERY` is in seconds.
At the end it prints the number of rounds.
"""

from __future__ import annotations

import json
import select
import sys
import time

import qdo
from bench.apps.traffic import APP
from bench.peers import common as tally


def main(broker: str, queues: int, every: float) -> None:
    """Send rounds at fixed times."""
    names = [tally.set_member(number) for number in range(queues)]
    with qdo.App(APP, broker=broker) as app:
        rounds = 0
        start = time.monotonic()
        while True:
            due = start + rounds * every
            if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
                break
            body = {"number": rounds, "sent": time.monotonic_ns()}
            app.send_many((name, body) for name in names)
            rounds += 1
    print(json.dumps({"rounds": rounds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
