"""Signed webhooks of 1 KiB beside Flask with Redis: ``python -m bench.ingest``.

A generator sends each webhook at its time, over open connections, and never waits for the one
before. qdo stores them in a file and syncs before each answer; Redis keeps them in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.support import report, services
from bench.support.processes import Program, cpu_seconds
from bench.support.statistics import Goal, percentile

SECRET = "benchmark"
CONNECTIONS = 20
RATE = 1000


def request(number: int) -> bytes:
    """Return a signed request with a body of 1 KiB."""
    body = json.dumps({"number": number, "text": "x" * 1000}).encode().ljust(1024)
    digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    head = f"POST /github HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    kind = f"Content-Type: application/json\r\nX-Hub-Signature-256: sha256={digest}\r\n\r\n"
    return (head + kind).encode() + body


def connect(port: int, timeout_seconds: float = 20.0) -> socket.socket:
    """Return a connection once the receiver listens."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            found = socket.create_connection(("127.0.0.1", port))
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def load(port: int, requests: Sequence[bytes], rate: float) -> list[float]:
    """Send requests at their times; return how much later than these each answer came."""
    delays: list[float] = []
    connect(port).close()
    began = time.perf_counter() + 0.2

    def send(first: int) -> None:
        with connect(port) as connection:
            for number in range(first, len(requests), CONNECTIONS):
                due = began + number / rate
                time.sleep(max(0.0, due - time.perf_counter()))
                connection.sendall(requests[number])
                answer = connection.recv(4096)
                while b"\r\n\r\n" not in answer or not answer.endswith(
                    (b"Accepted\n", b"accepted")
                ):
                    answer += connection.recv(4096) or sys.exit(f"got {answer!r}")
                delays.append(time.perf_counter() - due)

    threads = [threading.Thread(target=send, args=(each,)) for each in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return delays


def of_servers() -> float:
    """Return the processor time of the processes that this one has started."""
    return cpu_seconds(os.getpid()) - time.process_time()


def measured(
    name: str, start: Callable[[ExitStack, int], None], seconds: float
) -> dict[str, float]:
    """Return the figures of one side."""
    report.say(name)
    port = services.free_port()
    warm, requests = range(100), [request(n) for n in range(100, 100 + round(RATE * seconds))]
    with ExitStack() as stack:
        start(stack, port)
        load(port, [request(number) for number in warm], RATE / 10)
        before = of_servers()
        delays = load(port, requests, RATE)
        spent = of_servers() - before
    return {
        f"{name}_answered": len(delays),
        f"{name}_median_ms": 1000 * statistics.median(delays),
        f"{name}_p99_ms": 1000 * percentile(delays, 99),
        f"{name}_processor_us_each": 1e6 * spent / len(delays),
    }


def start_qdo(stack: ExitStack, port: int) -> None:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-ingest-"))
    listen = ("--listen", f"127.0.0.1:{port}")
    argv = [sys.executable, "-m", "qdo", "ingest", "--app", "bench.apps.webhooks:app", *listen]
    places = {"QDO_BROKER": f"sqlite:{folder}/m.db", "QDO_COORDINATOR": f"sqlite:{folder}/c.db"}
    environment = {**places, "BENCH_SECRET": SECRET}
    stack.enter_context(Program(argv, environment=environment))


def flask_starter(python: Path, durable: bool) -> Callable[[ExitStack, int], None]:
    def start(stack: ExitStack, port: int) -> None:
        url = stack.enter_context(services.redis(durable))
        argv = [str(python), "-m", "bench.peers.with_flask", f"127.0.0.1:{port}"]
        environment = {"BENCH_REDIS": url, "BENCH_SECRET": SECRET}
        stack.enter_context(Program(argv, environment=environment))

    return start


def main() -> int:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.ingest", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--no-peers", action="store_true", help="without Flask and Redis")
    parser.add_argument("--peers-venv", type=Path, default=services.PEERS)
    given = parser.parse_args()
    described, seconds = report.machine(), 1.0 if given.quick else 20.0
    found = measured("qdo", start_qdo, seconds)
    python = None if given.no_peers else services.peers_python(given.peers_venv)
    if python is not None:
        found |= measured("flask_redis", flask_starter(python, durable=False), seconds)
        found |= measured("flask_synced_redis", flask_starter(python, durable=True), seconds)
    print(report.table(("figure", "found"), [(n, f"{value:,.1f}") for n, value in found.items()]))
    result = {
        "machine": described,
        "versions": report.versions(("gevent", "ujson")),
        "peers": report.versions(("flask", "gevent", "redis"), python) if python else {},
        "plan": {"rate": RATE, "connections": CONNECTIONS, "seconds": seconds},
        "figures": found,
    }
    goals = [Goal.at_most("p99 of 1,000 webhooks/s, ms", 20, found["qdo_p99_ms"], ",.1f")]
    return report.finish("ingest", result, [] if given.quick else goals)


if __name__ == "__main__":
    sys.exit(main())
