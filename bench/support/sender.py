"""Sends stamped messages to one queue of the embedded broker at random intervals.

``python -m bench.support.sender BROKER COUNT``; each send is durable before the next pause begins.
"""

from __future__ import annotations

import sys

import qdo
from bench.peers import common as tally


def main(broker: str, count: int) -> None:
    """Send `count` messages, each with the time just before its `send`."""
    with qdo.App("bench", broker=broker) as app:
        queue = tally.queue_name(0)
        tally.send_paced(lambda value: app.send(queue, value), count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
