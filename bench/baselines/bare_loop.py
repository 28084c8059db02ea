"""The least work of one process: fetch, decode, call.

``python -m bench.baselines.bare_loop FILE BATCH``: reads all queues of a message file
of the embedded broker in turn, with the query and the batch size of a worker.
"""

from __future__ import annotations

import sqlite3
import sys

import ujson

from bench.peers import common as tally

_QUEUES = "SELECT id FROM queues ORDER BY name"
_FETCH = (
    "SELECT position, body, key, headers FROM messages"
    " WHERE queue = ? AND position > ? ORDER BY position LIMIT ?"
)


def main(path: str, batch: int) -> None:
    """Call the job for every message."""
    job = tally.from_environment()
    decode = ujson.loads
    connection = sqlite3.connect(path)
    after = {queue: 0 for (queue,) in connection.execute(_QUEUES).fetchall()}
    while after:
        for queue, position in list(after.items()):
            rows = connection.execute(_FETCH, (queue, position, batch)).fetchall()
            for row in rows:
                job(decode(row[1]))
            if rows:
                after[queue] = rows[-1][0]
            else:
                del after[queue]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
