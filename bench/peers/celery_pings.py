"""Celery's remote control on Redis: ``python -m bench.peers.celery_pings MODE ...``.

``worker N`` is a worker, ``count`` prints how many answer, ``wait TIMES N`` and ``last TIMES N``
print the seconds of `inspect ping`: with the whole timeout, and until N workers have answered.
``flip TIMES N`` prints the seconds of a broadcast that changes a value in all N workers, until the
last one has said that it has the new one.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from celery import Celery
from celery.worker.control import control_command

app = Celery("pings", broker=os.environ["BENCH_REDIS"])
app.conf.broker_connection_retry_on_startup = True
TIMEOUT_SECONDS = 1.0
PATIENCE_SECONDS = 20.0


@control_command(args=[("value", int)])
def set_attempts(state: Any, value: int) -> dict[str, int]:
    """Change a setting of a worker."""
    app.conf.task_annotations = {"*": {"max_retries": value}}
    return {"value": value}


def flip(times: int, wanted: int) -> None:
    """Change the setting of all workers again and again."""
    for number in range(times + 1):
        began = time.perf_counter()
        answers = app.control.broadcast(
            "set_attempts",
            arguments={"value": number},
            reply=True,
            timeout=PATIENCE_SECONDS,
            limit=wanted,
        )
        took = time.perf_counter() - began
        if len(answers) != wanted:
            raise SystemExit(f"{len(answers)} of {wanted} workers answered")
        if number:  # the first one connects
            print(took)


def main(mode: str, *words: str) -> None:
    """Do one of the modes."""
    if mode == "worker":
        app.worker_main(["worker", "--pool", "solo", "--hostname", f"w{words[0]}@here"])
    elif mode == "count":
        print(len(app.control.inspect(timeout=TIMEOUT_SECONDS).ping() or {}))
    elif mode == "flip":
        flip(int(words[0]), int(words[1]))
    else:
        wanted = int(words[1])
        limit = wanted if mode == "last" else None
        for number in range(int(words[0]) + 1):
            began = time.perf_counter()
            found = app.control.inspect(timeout=TIMEOUT_SECONDS, limit=limit).ping() or {}
            took = time.perf_counter() - began
            if len(found) != wanted:
                raise SystemExit(f"{len(found)} of {wanted} workers answered")
            if number:  # the first one connects
                print(took)


if __name__ == "__main__":
    main(*sys.argv[1:])
