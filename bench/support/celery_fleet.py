"""Celery workers over Redis, as a peer of what qdo tells its workers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.support import services
from bench.support.processes import Program

START_SECONDS = 300.0
LOOK_SECONDS = 0.2


@contextmanager
def celery_fleet(python: Path, workers: int) -> Iterator[Callable[..., list[str]]]:
    """Run workers with one process each; yield a function that returns the words of a mode.

    :param python: of the environment of the peers.
    """
    with ExitStack() as stack:
        url = stack.enter_context(services.redis())
        environment = {"BENCH_REDIS": url, "BENCH_REPORT": "1"}
        celery = [str(python), "-m", "bench.peers.celery_pings"]
        for number in range(workers):
            argv = [*celery, "worker", str(number)]
            stack.enter_context(Program(argv, environment=environment))
        inherited = {**os.environ, **environment}

        def ask(*words: str) -> list[str]:
            done = subprocess.run(
                [*celery, *words], env=inherited, check=True, capture_output=True, text=True
            )
            return done.stdout.split()

        deadline = time.monotonic() + START_SECONDS
        while int(ask("count")[0]) < workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {workers} Celery workers are there")
            time.sleep(LOOK_SECONDS)
        yield ask
