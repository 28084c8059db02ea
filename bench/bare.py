"""The least that one process can do: fetch, decode, call.

``python -m bench.bare FILE BATCH``: reads all queues of a message file of the embedded broker
in turn, as many rows at a time as a worker fetches, with the same query.
"""

from __future__ import annotations

import sqlite3
import sys

import ujson

from bench.peers import tally

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
