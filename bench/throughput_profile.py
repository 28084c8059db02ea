"""Throughput of the worker engine, compared with a bare loop over the same rows in one process.

    python -m bench.throughput_profile [--messages N] [--queues N] [--profile] [--json]

The bare loop fetches the same rows in the same batches from the embedded broker, decodes each
body and calls the same no-op function. The engine runs the same messages with its dispatcher,
pipeline and lease check, and records checkpoints with a member in memory. So this measures the
loop; `bench.throughput` measures whole processes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gevent import monkey

monkey.patch_all()

import gevent  # noqa: E402
import ujson  # noqa: E402
from gevent.event import Event  # noqa: E402

from qdo.app import App  # noqa: E402
from qdo.brokers.base import Broker, Outgoing  # noqa: E402
from qdo.brokers.registry import open_broker  # noqa: E402
from qdo.coordination.protocol.claims import Claim  # noqa: E402
from qdo.coordination.protocol.lease import Lease  # noqa: E402
from qdo.coordination.znodes.layout import Layout  # noqa: E402
from qdo.history.writer import HistoryWriter  # noqa: E402
from qdo.settings.live import SettingsInForce  # noqa: E402
from qdo.settings.settings import Settings  # noqa: E402
from qdo.system.clock import clock  # noqa: E402
from qdo.worker.engine.context import Engine  # noqa: E402
from qdo.worker.engine.dispatcher import Dispatcher, Loop  # noqa: E402
from qdo.worker.engine.pipeline import Pipeline  # noqa: E402
from qdo.worker.executors.router import GreenletExecutor  # noqa: E402

BODY_BYTES = 100
FETCH = 1000
TURN_SECONDS = 0.02
CHECKPOINT_SECONDS = 0.2
PERMITS = 1000
STARTS = 1_000_000
"""Of the rate that never bites, at once and in a second."""


METERED = Settings(app="bench", fetch=FETCH, turn_seconds=TURN_SECONDS, http="127.0.0.1:0")


class MemoryMember:
    """Collects progress like the coordination member, and drops it at each checkpoint."""

    name = "worker-0000000000"
    is_pool = False

    def __init__(self) -> None:
        self.lease = Lease(3600.0, clock())
        self.progressed: list[Claim] = []
        self.checkpoints = 0

    def progress(self, claim: Claim) -> None:
        self.progressed.append(claim)

    def record(self, claim: Claim) -> bool:
        return True

    def finished(self, claim: Claim) -> None:
        """Do nothing: no queue is released here."""

    def call(self, event: Callable[[], object]) -> None:
        """Do nothing: no share of a limit is written here."""

    def checkpoint_for_ever(self) -> None:
        """Write nothing, as often as a member writes."""
        while True:
            gevent.sleep(CHECKPOINT_SECONDS)
            self.progressed.clear()
            self.checkpoints += 1


def fill(broker: Broker, queues: list[str], messages: int) -> None:
    """Send the messages, in turn to each queue."""
    body = ujson.dumps({"text": "x" * (BODY_BYTES - len('{"text":""}'))}).encode()
    batch: list[Outgoing] = []
    for number in range(messages):
        batch.append(Outgoing(queues[number % len(queues)], body))
        if len(batch) == 20_000:
            broker.send_many(batch)
            batch = []
    broker.send_many(batch)


def noop(message: Any, context: Any) -> None:
    """Do nothing: the measured job."""


def bare_loop(broker: Broker, queues: list[str]) -> float:
    """Return the messages per second of the bare loop: fetch, decode, call."""
    readers = [broker.reader(queue, 0) for queue in queues]
    loads = ujson.loads
    count = 0
    start = time.perf_counter()
    while readers:
        for reader in list(readers):
            rows = reader.fetch(FETCH)
            if not rows:
                readers.remove(reader)
            for _, body, _, _ in rows:
                noop(loads(body), None)
            count += len(rows)
    return count / (time.perf_counter() - start)


def engine(
    broker: Broker,
    queues: list[str],
    messages: int,
    settings: Settings | None = None,
    limits: Sequence[str] = (),
    rated: bool = False,
    type: Any = None,
) -> float:
    """Return the messages per second of the worker engine.

    :param limits: of the job; this process has more of each than it uses.
    :param rated: the limits have a rate instead of a number of permits.
    :param type: of the job's bodies.
    """
    app = App("bench")
    app.job(limits=limits, body=type)(noop)
    quiet = Event()
    member = MemoryMember()
    if settings is None:
        settings = Settings(app="bench", fetch=FETCH, turn_seconds=TURN_SECONDS)
    pipeline = Pipeline(Engine.build(app, broker, GreenletExecutor(), SettingsInForce(settings)))
    writer = None
    if pipeline.history is not None:
        writer = HistoryWriter(settings.history, app.name, pipeline.history)
        writer.start()
    dispatcher = Dispatcher(pipeline, concurrency=100, loop=Loop(on_quiet=quiet.set))
    for share in pipeline.limits.join(app.jobs, {}, Layout.of("bench"), member):
        share.permits.unlimited, share.starts.unlimited = rated, not rated
        share.permits.acknowledge(PERMITS, PERMITS, clock())
        share.starts.set_rate(1.0, clock())
        share.starts.acknowledge(STARTS, STARTS, clock())
    checkpoints = gevent.spawn(member.checkpoint_for_ever)
    start = time.perf_counter()
    for queue in queues:
        dispatcher.claimed(member, Claim(queue, 1, 0, member.lease))
    quiet.wait()
    taken = time.perf_counter() - start
    checkpoints.kill()
    if writer is not None:
        writer.close()
    if pipeline.counters.processed != messages or not dispatcher.all_idle():
        raise SystemExit(f"{pipeline.counters.processed} of {messages} messages processed")
    return messages / taken


def main() -> int:
    """Measure both several times in turn, and print the best of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="profile one run of the engine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    queues = [f"queue-{number:03d}" for number in range(options.queues)]
    with tempfile.TemporaryDirectory() as folder:
        broker = open_broker(f"sqlite:{Path(folder) / 'messages.db'}", "bench")
        fill(broker, queues, options.messages)
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(engine, broker, queues, options.messages)
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(20)
        rounds = [
            (
                bare_loop(broker, queues),
                engine(broker, queues, options.messages),
                engine(broker, queues, options.messages, limits=["crm"]),
                engine(broker, queues, options.messages, limits=["crm"], rated=True),
                engine(broker, queues, options.messages, METERED),
            )
            for _ in range(options.rounds)
        ]
        broker.close()
    bare, ours, limited, rated, metered = (max(rates) for rates in zip(*rounds, strict=True))
    result = {"bare_per_second": round(bare), "engine_per_second": round(ours)}
    result["limited_per_second"], result["rated_per_second"] = round(limited), round(rated)
    result["metered_per_second"] = round(metered)
    if options.json:
        print(json.dumps({**result, "ratio": round(ours / bare, 3)}))
    else:
        print(f"bare loop {bare:12,.0f} messages/s\nengine    {ours:12,.0f} messages/s")
        print(f"limited   {limited:12,.0f} messages/s  (a job with a limit that never bites)")
        print(f"rated     {rated:12,.0f} messages/s  (a job with a rate that never bites)")
        print(f"metered   {metered:12,.0f} messages/s  (counted for /metrics)")
        print(f"ratio     {ours / bare:12.2f}  (goal: 0.4 or more)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
