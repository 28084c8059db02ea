"""The least work of one process with PostgreSQL: fetch, decode, call.

``python -m bench.baselines.bare_postgresql_loop BATCH``: reads all queues of qdo's schema in the
database ``BENCH_POSTGRESQL`` in turn, with prepared statements and binary rows.
"""

from __future__ import annotations

import os
import sys

import psycopg
import ujson

from bench.peers import common as tally

_QUEUES = "SELECT id FROM qdo.queues ORDER BY name"
_FETCH = (
    "SELECT position, body, key, headers FROM qdo.messages"
    " WHERE queue = %s AND position > %s ORDER BY position LIMIT %s"
)


def main(batch: int) -> None:
    """Call the job for every message."""
    job = tally.from_environment()
    decode = ujson.loads
    with (
        psycopg.connect(os.environ["BENCH_POSTGRESQL"], autocommit=True) as connection,
        connection.cursor(binary=True) as cursor,
    ):
        after = {queue: 0 for (queue,) in cursor.execute(_QUEUES).fetchall()}
        while after:
            for queue, position in list(after.items()):
                rows = cursor.execute(_FETCH, (queue, position, batch), prepare=True).fetchall()
                for row in rows:
                    job(decode(row[1]))
                if rows:
                    after[queue] = rows[-1][0]
                else:
                    del after[queue]


if __name__ == "__main__":
    main(int(sys.argv[1]))
