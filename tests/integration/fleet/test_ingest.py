"""`qdo ingest` as processes: behind a balancer with kills, with rude clients, and badly started."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from gevent.pool import Pool

from qdo import App
from qdo.brokers.registry import open_broker
from qdo.ingest import wsgi
from qdo.system import web_server
from qdo.system.web_server import WebServer
from qdo.testing import TestKit
from tests.support.cli import QDO, clean_environment, command
from tests.support.postgresql.proxy import CuttingProxy
from tests.support.postgresql.schema import prepared
from tests.support.processes import Proc, wait_until
from tests.support.webhook_sender import SECRET, post, signed
from tests.support.zookeeper import free_ports

APP = """
import qdo

app = qdo.App("ci")
app.webhook("/github", queue="github", verify="github", secret="env:CI_SECRET")
none = qdo.App("none")
"""


class ReceiverProcess:
    """A process of `qdo ingest`, which can be killed and started again at its port."""

    def __init__(self, folder: Path, broker: str, coordinator: str = "") -> None:
        (self.port,) = free_ports(1)
        (folder / "ci.py").write_text(APP)
        places = {"QDO_BROKER": broker, "QDO_COORDINATOR": coordinator or f"sqlite:{folder}/c.db"}
        more = {"CI_SECRET": SECRET, "QDO_CONNECT_SECONDS": "1"}
        self._environment = clean_environment({**places, **more})
        self._folder = folder
        self.start()

    def start(self) -> None:
        argv = (*QDO, "ingest", "--app", "ci:app", "--listen", f"127.0.0.1:{self.port}")
        self.proc = Proc.python(*argv, env=self._environment, cwd=self._folder)

    def wait(self) -> None:
        self.proc.wait_for_line(r"^ingest: http://", timeout_seconds=60)

    def kill(self) -> None:
        with self.proc:
            self.proc.kill()


class Balancer(CuttingProxy):
    """Forwards each connection to the next receiver that accepts it."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._count = len(ports)
        super().__init__(0)

    def connect(self) -> socket.socket:
        for _ in range(self._count):
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", next(self._ports)))
        raise ConnectionRefusedError


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize("kind", ["embedded", "postgresql"])
def test_kills_lose_nothing_and_store_nothing_twice(
    kind: str, stack: ExitStack, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of receivers, of their answers, and of the broker; the senders repeat until a 202."""
    url, server = f"sqlite:{tmp_path}/messages.db", None
    if kind == "postgresql":
        server = request.getfixturevalue("postgresql_server")
        url = prepared(server.address.url(server.address.create_database()))
    receivers = [ReceiverProcess(tmp_path, url) for _ in range(2)]
    for each in receivers:
        stack.callback(lambda each=each: each.kill())
        each.wait()
    listing = (*QDO, "workers", "--all", "--app", "ci", "--coordinator", f"sqlite:{tmp_path}/c.db")

    def listed() -> set[int]:
        ended = command(*listing, "-o", "json", cwd=tmp_path)
        return {each["pid"] for each in json.loads(ended.out)["items"]}

    wait_until(lambda: listed() == {each.proc.pid for each in receivers}, "they are listed", 60)
    balancer = Balancer([each.port for each in receivers])
    stack.enter_context(closing(balancer))
    numbers, over, sent, repeated = itertools.count(), threading.Event(), list[int](), list[int]()

    def send() -> None:
        while not over.is_set():
            number = next(numbers)
            body = b'{"n": %d}' % number
            while (status := post(balancer.port, "/github", body, signed("github", body))) != 202:
                repeated.append(status)
                assert status in (0, 503)
            sent.append(number)

    senders = [threading.Thread(target=send) for _ in range(4)]
    for thread in senders:
        thread.start()

    def go_on() -> None:
        goal = len(sent) + 30
        wait_until(lambda: len(sent) >= goal, "the senders go on", 60)

    try:
        for each in receivers * 2:
            go_on()
            balancer.cut_after("answer", 5)
            each.kill()
            each.start()
            go_on()
            if server is not None and each is receivers[0]:
                server.kill()
                server.start()
            each.wait()
        go_on()
    finally:
        over.set()
        for thread in senders:
            thread.join(60)
    with closing(open_broker(url, "ci")) as found:
        stored = [json.loads(row[1])["n"] for row in found.reader("github", 0).fetch(1_000_000)]
    assert sorted(stored) == sorted(sent)
    assert 0 in repeated
    assert (503 in repeated) == (server is not None)


RUDE = (
    b"POST /github HTTP/1.1\r\nHost: x\r\nX-H",
    b"POST /github HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{",
    b"POST /github HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 2_000_000,
    b"POST /github HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 9000 + b"\r\n" * 5,
    b"POST /github HTTP/1.1\r\nHost: x\r\n" + b"X-A: y\r\n" * 5000,
    b"POST /github HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n{}",
    b"POST /github HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 8\r\n\r\n{}123456",
    b"",
)
"""Requests that are slow, endless, cut or ambiguous."""


def test_rude_clients_delay_no_other_and_store_nothing(stack: ExitStack, tmp_path: Path) -> None:
    """More of them than there are connections; every other one goes without an answer."""
    url = f"sqlite:{tmp_path}/messages.db"
    receiver = ReceiverProcess(tmp_path, url)
    stack.callback(receiver.kill)
    receiver.wait()
    for number in range(web_server.CONNECTIONS + 50):
        client = stack.enter_context(
            closing(socket.create_connection(("127.0.0.1", receiver.port)))
        )
        client.setblocking(False)
        with suppress(OSError):
            client.send(RUDE[number % len(RUDE)])
        if number % 2:
            client.close()
    body, began = b'{"n": 1}', time.monotonic()
    for _ in range(20):
        assert post(receiver.port, "/github", body, signed("github", body)) == 202
    assert time.monotonic() - began < 10.0
    with closing(open_broker(url, "ci")) as found:
        assert len(found.reader("github", 0).fetch(100)) == 1
    assert "Traceback" not in receiver.proc.output


@pytest.mark.parametrize("mutant", [False, True])
def test_slow_clients_must_make_room(
    mutant: bool, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that rule of the server they delay the others."""
    monkeypatch.setenv("CI_SECRET", SECRET)
    app = App("ci")
    app.webhook("/github", queue="github", verify="github", secret="env:CI_SECRET")
    stack.enter_context(TestKit(app, without_job="*"))
    if mutant:
        monkeypatch.setattr(web_server._Places, "full", Pool.full)
    server = stack.enter_context(closing(WebServer(wsgi(app), ("127.0.0.1", 0), connections=5)))
    for _ in range(20):
        slow = stack.enter_context(closing(socket.create_connection(server.address)))
        slow.sendall(RUDE[0])
    with closing(socket.create_connection(server.address, timeout=2.0)) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        try:
            delayed = not client.recv(100).startswith(b"HTTP/1.1 200 ")
        except TimeoutError:
            delayed = True
    assert delayed == mutant


def test_a_receiver_needs_the_broker_alone(tmp_path: Path) -> None:
    """It receives while the coordinator does not respond; SIGTERM ends it with success."""
    broker = f"sqlite:{tmp_path}/messages.db"
    receiver = ReceiverProcess(tmp_path, broker, f"zookeeper://127.0.0.1:{free_ports(1)[0]}")
    with receiver.proc as proc:
        receiver.wait()
        assert post(receiver.port, "/github", b"{}", signed("github", b"{}")) == 202
        proc.wait_for_line("WARNING .*not listed")
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0
        assert proc.output.count("/github 202: 1") == 1
        assert proc.output.count("not listed") == 1, "its end waits for no coordinator"


@pytest.mark.parametrize(
    ("options", "secret"),
    [
        (("--app", "ci"), SECRET),
        (("--app", "ci:none"), SECRET),
        (("--app", "ci:app"), ""),
        (("--app", "ci:app", "--listen", "8080"), SECRET),
        (("--app", "ci:app", "--listen", "192.0.2.1:80"), SECRET),
    ],
)
def test_a_receiver_that_cannot_receive_ends_with_2(
    options: tuple[str, ...], secret: str, tmp_path: Path
) -> None:
    """No code, no webhook, no secret, no address, an address of another machine."""
    (tmp_path / "ci.py").write_text(APP)
    ended = command(*QDO, "ingest", *options, cwd=tmp_path, env={"CI_SECRET": secret})
    assert ended.code == 2, ended
    assert SECRET not in ended.err
