"""Recording progress with plain kazoo: ``python -m bench.peers.with_kazoo HOSTS PATH QUEUES WAY
SECONDS``; prints one line of JSON.

`WAY` is ``set`` (one call after another) or ``async`` (many concurrent calls).
"""

from __future__ import annotations

import collections
import itertools
import json
import sys
import time

from kazoo.client import KazooClient

from bench.peers import common as tally

UNDER_WAY = 1000
VALUE = b'{"last":"140000000000000000","owner":"worker-0000000001"}'


def main(hosts: str, path: str, queues: int, way: str, seconds: float) -> None:
    """Set every queue's node in turn for a while, and print how many were set."""
    client = KazooClient(hosts=hosts, timeout=10.0)
    client.start()
    paths = [f"{path}/{tally.set_member(number)}" for number in range(queues)]
    began, cpu = time.monotonic(), time.process_time()
    written = 0
    pending: collections.deque[object] = collections.deque()
    for each in itertools.cycle(paths):
        if time.monotonic() - began >= seconds:
            break
        if way == "set":
            client.set(each, VALUE)
        else:
            pending.append(client.set_async(each, VALUE))
            if len(pending) >= UNDER_WAY:
                pending.popleft().get()  # type: ignore[attr-defined]
        written += 1
    for answer in pending:
        answer.get()  # type: ignore[attr-defined]
    elapsed = time.monotonic() - began
    used = time.process_time() - cpu
    print(json.dumps({"rate": written / elapsed, "busy": used / elapsed}), flush=True)
    client.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
