"""How to start, fill and send to each program that qdo is compared with.

Commands run in the peers' virtual environment, whose folder of programs is ``{bin}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Rival:
    """One program in a comparison.

    :ivar worker: command of its one worker process.
    :ivar feed: command that fills its queues or sends to them, before a subcommand and a number.
    :ivar how: its set-up, for the table and the JSON.
    :ivar messages: number for a throughput run that takes seconds, not minutes.
    :ivar durable: Redis syncs every message to disk, like qdo's embedded broker.
    :ivar judged: qdo must be faster; otherwise the program is only shown.
    :ivar schema: command that creates its tables; None if its sender or worker does.
    :ivar sends: whether its sender is measured, too.
    :ivar batches: whether it can send many messages in one transaction.
    """

    name: str
    worker: tuple[str, ...]
    feed: tuple[str, ...]
    how: str
    environment: Mapping[str, str] = field(default_factory=dict)
    messages: int = 20_000
    durable: bool = False
    judged: bool = True
    schema: tuple[str, ...] | None = None
    sends: bool = True
    batches: bool = False

    def worker_command(self, python: Path) -> list[str]:
        return _located(self.worker, python)

    def feed_command(self, python: Path, command: str, count: int) -> list[str]:
        return [*_located(self.feed, python), command, str(count)]

    def schema_command(self, python: Path) -> list[str] | None:
        return None if self.schema is None else _located(self.schema, python)


def _located(command: tuple[str, ...], python: Path) -> list[str]:
    return [part.format(bin=python.parent) for part in command]


def _module(name: str) -> tuple[str, ...]:
    return ("{bin}/python", "-m", f"bench.peers.{name}")


def _dramatiq(threads: int, *options: str) -> tuple[str, ...]:
    return (
        *("{bin}/dramatiq", "bench.peers.with_dramatiq"),
        *("--processes", "1", "--threads", str(threads), *options),
    )


def _huey(workers: int, kind: str) -> tuple[str, ...]:
    return (
        *("{bin}/huey_consumer", "bench.peers.with_huey.huey"),
        *("--workers", str(workers), "--worker-type", kind, "--quiet", "--no-periodic"),
    )


def _celery(pool: str, queues: str, module: str = "with_celery") -> tuple[str, ...]:
    return (
        *("{bin}/celery", "-A", f"bench.peers.{module}", "worker", "--loglevel", "WARNING"),
        *("--pool", pool, "--concurrency", "1", "--queues", queues),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    )


def _celery_queues(count: int) -> str:
    return ",".join(f"bench-{number:02d}" for number in range(count))


def _confluent(settings: Mapping[str, int]) -> tuple[str, ...]:
    pairs = [f"{name}={value}" for name, value in settings.items()]
    return (*_module("with_kafka"), "consume", *pairs)


REDIS_THROUGHPUT = (
    Rival(
        "Dramatiq",
        _dramatiq(4),
        _module("with_dramatiq"),
        "16 queues, 1 process of 4 threads, prefetch 1000",
        {"dramatiq_queue_prefetch": "1000"},
    ),
    Rival(
        "Huey",
        _huey(2, "thread"),
        _module("with_huey"),
        "1 queue (a consumer takes one), 2 threads, no results",
    ),
    Rival(
        "Celery",
        _celery("solo", _celery_queues(16)),
        _module("with_celery"),
        "16 queues, pool solo, prefetch 128, results ignored",
        {"BENCH_PREFETCH": "128"},
        messages=6_000,
    ),
)

REDIS_LATENCY = (
    Rival("Huey", _huey(1, "thread"), _module("with_huey"), "1 thread, blocking pop"),
    Rival(
        "Huey, durable",
        _huey(1, "thread"),
        _module("with_huey"),
        "1 thread, blocking pop, appendfsync always",
        durable=True,
    ),
    Rival(
        "Taskiq",
        ("{bin}/taskiq", "worker", "bench.peers.with_taskiq:broker", "--workers", "1"),
        _module("with_taskiq"),
        "ListQueueBroker, 1 worker process",
    ),
    Rival(
        "Celery",
        _celery("solo", "bench-00"),
        _module("with_celery"),
        "pool solo, results ignored",
    ),
    Rival(
        "Dramatiq",
        _dramatiq(1),
        _module("with_dramatiq"),
        "1 process of 1 thread",
    ),
    Rival(
        "arq",
        ("{bin}/arq", "bench.peers.with_arq.WorkerSettings"),
        _module("with_arq"),
        "default poll_delay of 0.5 s",
    ),
)

KAFKA = (
    Rival(
        "confluent-kafka",
        _confluent({}),
        _module("with_kafka"),
        "consume(1000), ujson, default settings",
        messages=600_000,
    ),
    Rival(
        "confluent-kafka, tuned",
        # By default it stops fetching for a second whenever 100,000 messages are waiting.
        _confluent({"fetch.queue.backoff.ms": 5}),
        _module("with_kafka"),
        "the same with fetch.queue.backoff.ms=5",
        messages=600_000,
        judged=False,
    ),
    Rival(
        "aiokafka, getmany",
        (*_module("with_aiokafka"), "many"),
        _module("with_kafka"),
        "getmany(max_records=1000), ujson",
        messages=600_000,
    ),
    Rival(
        "aiokafka",
        (*_module("with_aiokafka"), "one"),
        _module("with_kafka"),
        "async for, ujson",
        messages=400_000,
    ),
    Rival(
        "Quix Streams",
        _module("with_quix"),
        _module("with_kafka"),
        "4 dataframes, JSON",
        messages=300_000,
    ),
    Rival(
        "Faust",
        _module("with_faust"),
        _module("with_kafka"),
        "1 agent, JSON",
        messages=50_000,
    ),
)

POSTGRESQL = (
    Rival(
        "Procrastinate",
        (
            *("{bin}/procrastinate", "--log-level", "warning"),
            *("--app", "bench.peers.with_procrastinate.app", "worker", "--concurrency", "50"),
            *("--delete-jobs", "successful"),
        ),
        _module("with_procrastinate"),
        "async jobs, concurrency 50, LISTEN, jobs deleted when done",
        messages=5_000,
        schema=(*_module("with_procrastinate"), "schema", "0"),
        batches=True,
    ),
    Rival(
        "PgQueuer",
        (*_module("with_pgqueuer"), "worker", "10"),
        _module("with_pgqueuer"),
        "asyncpg, uvloop, async jobs, default batches of 10",
        messages=20_000,
        schema=("{bin}/pgq", "install"),
        batches=True,
    ),
    Rival(
        "PgQueuer, tuned",
        (*_module("with_pgqueuer"), "worker", "1000"),
        _module("with_pgqueuer"),
        "the same with batches of 1,000",
        messages=100_000,
        schema=("{bin}/pgq", "install"),
        sends=False,
    ),
    Rival(
        "Dramatiq",
        (
            *("{bin}/dramatiq", "bench.peers.with_dramatiq_pg"),
            *("--processes", "1", "--threads", "8"),
        ),
        _module("with_dramatiq_pg"),
        "dramatiq-pg, 1 process of 8 threads, no results",
        messages=5_000,
        schema=(*_module("with_dramatiq_pg"), "schema", "0"),
    ),
    Rival(
        "Celery",
        _celery("solo", "bench-00", "with_celery_postgresql"),
        _module("with_celery_postgresql"),
        "SQLAlchemy transport, pool solo, prefetch without limit, results ignored",
        {"BENCH_PREFETCH": "0"},
        messages=3_000,
        schema=(*_module("with_celery_postgresql"), "schema", "0"),
    ),
)
