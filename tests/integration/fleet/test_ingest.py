"""`qdo ingest` as processes: behind a balancer with kills, with rude clients, and badly started."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from qdo.brokers.registry import open_broker
from qdo.system.web_server import CONNECTIONS
from tests.support.cli import QDO, clean_environment, command
from tests.support.paths import ROOT
from tests.support.postgresql.proxy import cutting
from tests.support.postgresql.schema import prepared
from tests.support.processes import Proc, wait_until
from tests.support.webhook_sender import SECRET, post, signed
from tests.support.zookeeper import free_ports

APP = """
import qdo

app = qdo.App("ci")
app.webhook("/github", queue="github", verify="github", secret="env:CI_SECRET")
none = qdo.App("none")
secretless = qdo.App("secretless")
secretless.webhook("/github", queue="github", verify="github", secret="env:NONE")
"""


class Receivers:
    """Processes of `qdo ingest` at ports of their own, and what they have stored."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self.broker = f"sqlite:{folder}/messages.db"
        self.coordinator = f"sqlite:{folder}/c.db"
        (folder / "ci.py").write_text(APP)

    def start(self, port: int, *options: str) -> Proc:
        argv = (*QDO, "ingest", "--app", "ci:app", "--listen", f"127.0.0.1:{port}", *options)
        places = {"QDO_BROKER": self.broker, "QDO_COORDINATOR": self.coordinator}
        more = {"CI_SECRET": SECRET, "QDO_CONNECT_SECONDS": "1"}
        env = clean_environment({**places, **more})
        return self._stack.enter_context(Proc.python(*argv, env=env, cwd=self._folder))

    def stored(self) -> list[int]:
        with closing(open_broker(self.broker, "ci")) as broker:
            rows = broker.reader("github", 0).fetch(1_000_000)
            return sorted(json.loads(row[1])["n"] for row in rows)


@pytest.fixture
def receivers(tmp_path: Path) -> Iterator[Receivers]:
    with ExitStack() as stack:
        yield Receivers(stack, tmp_path)


def sent(port: int, number: int) -> int:
    """Send a webhook; return the status, 0 without an answer."""
    body = b'{"n": %d}' % number
    return post(port, "/github", body, signed("github", body))


@pytest.mark.parametrize("kind", ["embedded", "postgresql"])
def test_kills_lose_nothing_and_store_nothing_twice(
    kind: str, receivers: Receivers, request: pytest.FixtureRequest
) -> None:
    """Of receivers, of their answers, and of the broker; the senders repeat until a 202."""
    server = request.getfixturevalue("postgresql_server") if kind == "postgresql" else None
    if server is not None:
        receivers.broker = prepared(server.address.url(server.address.create_database()))
    ports = free_ports(2)
    procs = [receivers.start(port) for port in ports]
    listing = ("workers", "--all", "--app", "ci", "--coordinator", receivers.coordinator)

    def listed() -> bool:
        found = command(*QDO, *listing, "-o", "json", cwd=ROOT).items()
        return {each["pid"] for each in found} == {each.pid for each in procs}

    wait_until(listed, "they are listed", 60)
    over, numbers, turns = threading.Event(), itertools.count(), itertools.count()
    accepted, repeated = list[int](), list[int]()

    def send() -> None:
        while not over.is_set():
            number = next(numbers)
            while (status := sent((proxy.port, ports[1])[next(turns) % 2], number)) != 202:
                repeated.append(status)
            accepted.append(number)

    def go_on() -> None:
        goal = len(accepted) + 30
        wait_until(lambda: len(accepted) >= goal, "the senders go on", 60)

    with cutting(ports[0]) as proxy, ThreadPoolExecutor(4) as senders:
        try:
            for _ in range(4):
                senders.submit(send)
            for turn in range(4):
                go_on()
                proxy.cut_after("answer", 5)
                procs[turn % 2].kill()
                proc = procs[turn % 2] = receivers.start(ports[turn % 2])
                go_on()
                # One that starts without its broker ends with an error, as documented.
                proc.wait_for_line("^ingest: http://", timeout_seconds=60)
                if server is not None and turn % 2:
                    server.kill()
                    server.start()
            go_on()
        finally:
            over.set()
    assert receivers.stored() == sorted(accepted)
    assert {*repeated} == ({0} if server is None else {0, 503})


POST = b"POST /github HTTP/1.1\r\nHost: x\r\n"
SLOW = (POST + b"X-H", POST + b"Content-Length: 1000000\r\n\r\n{", b"")
RUDE = (
    POST + b"Content-Length: 99999999\r\n\r\n" + b"x" * 2_000_000,
    POST + (b"X: " + b"y" * 9000 + b"\r\n") * 5,
    POST + b"X-A: y\r\n" * 5000,
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffff\r\n{}",
    POST + b"Content-Length: 2\r\nContent-Length: 8\r\n\r\n{}123456",
)
"""Requests that are endless, cut or ambiguous."""


def test_rude_clients_delay_no_other_and_store_nothing(receivers: Receivers) -> None:
    """More of them than there are connections."""
    (port,) = free_ports(1)
    receiver = receivers.start(port)
    receiver.wait_for_line("^ingest: http://", timeout_seconds=60)
    with ExitStack() as stack:
        for request in (*RUDE * 10, *SLOW * (CONNECTIONS // 3 + 30)):
            client = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
            client.setblocking(False)
            with suppress(OSError):
                client.send(request)
        assert [sent(port, 1) for _ in range(20)] == [202] * 20
        with pytest.raises(BlockingIOError):
            client.recv(1)  # the receiver still waits for the last one
    assert receivers.stored() == [1]
    assert "Traceback" not in receiver.output


def test_a_receiver_needs_the_broker_alone(receivers: Receivers) -> None:
    """It receives while the coordinator does not respond; SIGTERM ends it with success."""
    port, nobody = free_ports(2)
    receivers.coordinator = f"zookeeper://127.0.0.1:{nobody}"
    proc = receivers.start(port)
    proc.wait_for_line("WARNING .*not listed")
    assert sent(port, 1) == 202
    proc.send(signal.SIGTERM)
    assert proc.wait() == 0
    assert proc.output.count("/github 202: 1") == 1
    assert proc.output.count("not listed") == 1, "its end waits for no coordinator"


@pytest.mark.parametrize(
    "options",
    [
        ("--app", "ci"),
        ("--app", "ci:none"),
        ("--app", "ci:secretless"),
        ("--app", "ci:app", "--listen", "8080"),
        ("--app", "ci:app", "--listen", "192.0.2.1:80"),
    ],
)
def test_a_receiver_that_cannot_receive_ends_with_2(
    options: tuple[str, ...], receivers: Receivers
) -> None:
    """No code, no webhook, no secret, no address, an address of another machine."""
    proc = receivers.start(0, *options)
    assert proc.wait() == 2, proc.output
    assert SECRET not in proc.output
