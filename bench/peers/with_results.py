"""Jobs with results: ``python -m bench.peers.with_results COMMAND`` for the peer in `BENCH_PEER`.

``worker`` works until the process ends. ``schema`` creates what a peer needs. ``ask SECONDS COUNT``
asks for jobs, waits for their values, and prints the figures as JSON, see `figures`.

Procrastinate and PgQueuer store no values: their askers wait until the job has succeeded. They look
as often as qdo does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.peers import common

OUTSTANDING = 100
ASKED = 10
"""Jobs that are asked for together, where a peer can."""
PLACES = 4
"""Jobs at once of each of the two worker processes."""
NOOP_PLACES = 50
"""The same for qdo's no-op jobs: it has a number for each job."""
NAPS_MS = (20, 200)
LONG_SHARE = 20
"""Every so many naps are long ones."""
PATIENCE_SECONDS = 60.0
VISIBILITY_SECONDS = 5
"""Celery on Redis delivers again what was not acknowledged for this time."""


def noop(value: Any) -> Any:
    return value


def nap(value: int) -> int:
    """Wait for some milliseconds."""
    time.sleep(value / 1e3)
    return value


def hold(value: str) -> int:
    """Write its process into a file, and last for ever, unless another attempt has done so."""
    if not Path(value).exists():
        Path(f"{value}.new").write_text(str(os.getpid()))
        Path(f"{value}.new").rename(value)
        time.sleep(600)
    return os.getpid()


JOBS: dict[str, Callable[[Any], Any]] = {"noop": noop, "nap": nap, "hold": hold}


def look_until(is_over: Callable[[], bool]) -> None:
    """Look after a millisecond, then less and less often, up to every 250."""
    pause, until = 0.001, time.monotonic() + PATIENCE_SECONDS
    while not is_over():
        if time.monotonic() > until:
            raise TimeoutError("the job is not over")
        time.sleep(pause)
        pause = min(1.25 * pause, 0.25)


class Peer:
    """A program that runs jobs and stores what they return.

    :ivar late: the errors of `wait` for a job that is not over in time.
    """

    late: tuple[type[Exception], ...] = (TimeoutError,)

    def schema(self) -> None:
        """Create what it needs."""

    def work(self) -> None:
        """Work until the process ends."""

    def ask(self, name: str, value: Any) -> Any:
        """Ask for a job; return its handle."""
        return self.ask_many(name, [value])[0]

    def ask_many(self, name: str, values: list[Any]) -> list[Any]:
        """Ask for jobs; return their handles."""
        return [self.ask(name, value) for value in values]

    def wait(self, handle: Any) -> Any:
        """Wait for the value of a job."""


class QdoPeer(Peer):
    def __init__(self) -> None:
        import qdo
        from qdo.errors import RequestTimeoutError

        self.late = (RequestTimeoutError,)
        self.app = qdo.App("bench")
        for name, function in JOBS.items():

            def run(request: Any, context: Any, of: Callable[[Any], Any] = function) -> Any:
                return of(request.body)

            places = NOOP_PLACES if name == "noop" else PLACES
            self.app.job(name, pool=True, concurrency=places)(run)

    def work(self) -> None:
        from qdo.__main__ import worker

        sys.argv = ["qdo-worker", "bench.peers.with_results:peer.app", "--processes", "2"]
        sys.exit(worker())

    def ask_many(self, name: str, values: list[Any]) -> list[Any]:
        return self.app.request_many({"pool": name, "body": value} for value in values)

    def wait(self, handle: Any) -> Any:
        return handle.result(PATIENCE_SECONDS)


class CeleryPeer(Peer):
    def __init__(self) -> None:
        from celery import Celery
        from celery.exceptions import TimeoutError as LateError

        self.late = (LateError,)
        url = os.environ["BENCH_REDIS"]
        self.app = Celery("bench", broker=url, backend=url)
        self.app.conf.update(
            broker_connection_retry_on_startup=True,
            broker_transport_options={"visibility_timeout": VISIBILITY_SECONDS},
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            worker_prefetch_multiplier=1,
        )
        self._tasks = {name: self.app.task(function, name=name) for name, function in JOBS.items()}

    def work(self) -> None:
        options = ("--pool", "prefork", "--concurrency", str(2 * PLACES), "--loglevel", "ERROR")
        self.app.worker_main(["worker", *options])

    def ask(self, name: str, value: Any) -> Any:
        return self._tasks[name].delay(value)

    def wait(self, handle: Any) -> Any:
        return handle.get(timeout=PATIENCE_SECONDS)


class RqPeer(Peer):
    """Each worker runs one job at a time."""

    def __init__(self) -> None:
        import rq
        from redis import Redis

        self._rq = rq
        self._connection = Redis.from_url(os.environ["BENCH_REDIS"])
        self._queue = rq.Queue(connection=self._connection)

    def work(self) -> None:
        from rq.worker_pool import WorkerPool

        pool = WorkerPool(["default"], connection=self._connection, num_workers=2 * PLACES)
        pool.start(logging_level="ERROR")

    def ask_many(self, name: str, values: list[Any]) -> list[Any]:
        function, retry = f"bench.peers.with_results.{name}", self._rq.Retry(max=3)
        prepare = self._queue.prepare_data
        data = [prepare(function, (each,), timeout=900, retry=retry) for each in values]
        return self._queue.enqueue_many(data)

    def wait(self, handle: Any) -> Any:
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            found = handle.latest_result(timeout=1)
            if found is not None and found.type is found.Type.SUCCESSFUL:
                return found.return_value
        raise TimeoutError("the job is not over")


class DramatiqPeer(Peer):
    def __init__(self) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker
        from dramatiq.results import Results
        from dramatiq.results.backends import RedisBackend
        from dramatiq.results.errors import ResultTimeout

        self._timeout = ResultTimeout
        self.broker = RedisBroker(url=os.environ["BENCH_REDIS"])
        self.broker.add_middleware(Results(backend=RedisBackend(url=os.environ["BENCH_REDIS"])))
        dramatiq.set_broker(self.broker)
        self._actors = {
            name: dramatiq.actor(actor_name=name, store_results=True, time_limit=900_000)(function)
            for name, function in JOBS.items()
        }

    def work(self) -> None:
        program = str(Path(sys.executable).with_name("dramatiq"))
        options = ("--processes", "2", "--threads", str(PLACES))
        os.execv(program, [program, "bench.peers.with_results:peer.broker", *options])

    def ask(self, name: str, value: Any) -> Any:
        return self._actors[name].send(value)

    def wait(self, handle: Any) -> Any:
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:  # a longer wait ends with an error of its connection
            with suppress(self._timeout):
                return handle.get_result(block=True, timeout=1000)
        raise TimeoutError("the job is not over")


class ProcrastinatePeer(Peer):
    """Its processes are two programs."""

    def __init__(self) -> None:
        from procrastinate import App, PsycopgConnector

        self.app = App(connector=PsycopgConnector(conninfo=os.environ["BENCH_POSTGRESQL"]))
        self._tasks = {name: self.app.task(function, name=name) for name, function in JOBS.items()}
        self._stack = ExitStack()

    @cached_property
    def _sender(self) -> Any:
        from procrastinate import SyncPsycopgConnector

        connector = SyncPsycopgConnector(conninfo=os.environ["BENCH_POSTGRESQL"])
        sender = self._stack.enter_context(self.app.replace_connector(connector))
        return self._stack.enter_context(sender.open())

    def schema(self) -> None:
        self._sender.schema_manager.apply_schema()

    def work(self) -> None:
        self.app.run_worker(concurrency=PLACES)

    def ask_many(self, name: str, values: list[Any]) -> list[Any]:
        assert self._sender  # it replaces the connector of the tasks
        return self._tasks[name].batch_defer(*({"value": value} for value in values))

    def wait(self, handle: Any) -> None:
        manager = self._sender.job_manager
        look_until(lambda: manager.get_job_status(handle).value == "succeeded")


class PgQueuerPeer(Peer):
    """Its processes are two programs."""

    def __init__(self) -> None:
        import psycopg
        from pgqueuer.db import SyncPsycopgDriver
        from pgqueuer.queries import SyncQueries

        self._url = os.environ["BENCH_POSTGRESQL"]
        self._connection = psycopg.connect(self._url, autocommit=True)
        self._queries = SyncQueries(SyncPsycopgDriver(self._connection))

    def work(self) -> None:
        import uvloop

        uvloop.run(self._work())

    async def _work(self) -> None:
        import asyncpg
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgDriver

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(PLACES))
        manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(self._url)))
        for name, function in JOBS.items():
            manager.entrypoint(name)(in_thread(function))
        await manager.run(batch_size=10)

    def ask_many(self, name: str, values: list[Any]) -> list[Any]:
        bodies: list[bytes | None] = [json.dumps(value).encode() for value in values]
        return self._queries.enqueue([name] * len(values), bodies, [0] * len(values))

    def wait(self, handle: Any) -> None:
        query = "SELECT 1 FROM pgqueuer_log WHERE job_id = %s AND status = 'successful'"
        look_until(lambda: bool(self._connection.execute(query, (int(handle),)).fetchone()))


def in_thread(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an entrypoint of PgQueuer."""

    async def run(job: Any) -> None:
        await asyncio.to_thread(function, json.loads(job.payload))

    return run


PEERS: dict[str, type[Peer]] = {
    "qdo": QdoPeer,
    "celery": CeleryPeer,
    "rq": RqPeer,
    "dramatiq": DramatiqPeer,
    "procrastinate": ProcrastinatePeer,
    "pgqueuer": PgQueuerPeer,
}


def throughput(peer: Peer, seconds: float) -> float:
    """Return jobs a second with up to `OUTSTANDING` at once."""
    waiting: deque[Any] = deque()
    done, began = 0, time.monotonic()
    while time.monotonic() < began + seconds:
        waiting.extend(peer.ask_many("noop", [common.body(done + each) for each in range(ASKED)]))
        while len(waiting) > OUTSTANDING - ASKED:
            peer.wait(waiting.popleft())
            done += 1
    rate = done / (time.monotonic() - began)
    while waiting:
        peer.wait(waiting.popleft())
    return rate


def latencies(peer: Peer, count: int) -> list[float]:
    """Return the sorted milliseconds from asking to the value, one at a time."""
    found = []
    for number in range(count):
        began = time.perf_counter()
        peer.wait(peer.ask("noop", common.body(number)))
        found.append(1e3 * (time.perf_counter() - began))
    return sorted(found)


def unfairness(peer: Peer, count: int) -> float:
    """Return how long naps take, some of which are long, beside the ideal of all places."""
    naps = [NAPS_MS[number % LONG_SHARE == 0] for number in range(count)]
    began = time.monotonic()
    for handle in [peer.ask("nap", each) for each in naps]:
        peer.wait(handle)
    return (time.monotonic() - began) * 1e3 * 2 * PLACES / sum(naps)


def recovery(peer: Peer, path: str) -> float | None:
    """Return the seconds from the kill of a process to the end of its job; None for never."""
    handle = peer.ask("hold", path)
    look_until(Path(path).exists)
    os.kill(int(Path(path).read_text()), signal.SIGKILL)
    began = time.monotonic()
    try:
        peer.wait(handle)
    except peer.late:
        return None
    return time.monotonic() - began


def figures(peer: Peer, seconds: float, count: int) -> dict[str, float | None]:
    """Return what is measured of a peer."""
    peer.wait(peer.ask("noop", 0))  # connects
    times = latencies(peer, count)
    return {
        "rate": throughput(peer, seconds),
        "median": times[count // 2],
        "p99": times[int(count * 0.99)],
        "naps": unfairness(peer, 2 * count),
        "killed": recovery(peer, os.path.abspath("holding")),
    }


def main(command: str, *words: str) -> None:
    """Do what the command line says."""
    if command == "worker":
        peer.work()
    elif command == "schema":
        peer.schema()
    else:
        print(json.dumps(figures(peer, float(words[0]), int(words[1]))), flush=True)


if "BENCH_PEER" in os.environ:
    peer = PEERS[os.environ["BENCH_PEER"]]()

if __name__ == "__main__":
    main(*sys.argv[1:])
