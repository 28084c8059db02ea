"""Clients of `qdo dashboard` that are slow, send too much, or break off."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from qdo.system.web_server import CONNECTIONS
from tests.support.dashboard.served import Served, served
from tests.support.dashboard.shop import FilledShop
from tests.support.processes import wait_until
from tests.support.security.certificates import Authority

POST = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
INNER = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
HIDDEN = b"Content-Length: %d\r\n\r\n%s" % (len(INNER), INNER)
"""The second request is in the body of the first, for a server that reads this header."""
CHUNKED = b"Content-Length: 4\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(INNER), INNER)
"""The same, for a server that reads Transfer-Encoding."""
LENGTHS = (b"-5", b"+5", b"5 5", b"5, 5", b"0x5", b"1e3", b"\xb2", b"five", b"9" * 30, b"1" * 5000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A dashboard for clients that leave it as it is."""
    folder = tmp_path_factory.mktemp("rude")
    with (
        closing(FilledShop(folder, f"sqlite:{folder / 'coordination.db'}")) as shop,
        ExitStack() as stack,
    ):
        shop.fill()
        yield served(stack, shop)


def test_slow_clients_hold_up_nobody(stack: ExitStack, local_shop: FilledShop) -> None:
    """Half requests, half forms, and readers that do not read."""
    server = served(stack, local_shop)
    halves = (
        b"GET / HTTP/1.1\r\nHost: loc",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\ncsrf",
        b"",
        b"GET /queues HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    wait_until(lambda: "Worst queues" in server.get("/")[1], "the app is read")
    for half in halves * 15:
        client = stack.enter_context(closing(server.connect()))
        client.sendall(half)
    slow = stack.enter_context(closing(server.connect()))
    slow.sendall(halves[0])
    check_pages(server, slow, "/", "/queues", "/settings", "/api/status")


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\nx",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding:\r\n"
        b"Transfer-Encoding: chunked\r\n" + CHUNKED,
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nno colon\r\n" + HIDDEN,
        *(POST + each + b"\r\n\r\n12345" for each in LENGTHS),
        POST + b"99999999\r\nUpgrade: websocket\r\n\r\nx",
        b"GET / HTTP/1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET //evil.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
    ],
)
def test_rude_requests_are_refused(server: Served, request_: bytes) -> None:
    """Without waiting for the rest of them, and without a traceback."""
    answer = server.send(request_)
    assert not answer or answer.split(b" ")[1][:1] in (b"3", b"4")
    assert answer.count(b"HTTP/1.1 ") <= 1, "a hidden request was answered"
    assert b"root:" not in answer
    assert "closing the HTTP connection" not in server.proc.output, "clients could fill the log"
    assert b"Location: //" not in answer
    assert "Traceback" not in server.proc.output


@pytest.mark.parametrize("length", [b"0000000000009999999999", b"65537", b"9" * 4000])
def test_a_body_without_end_is_not_read(stack: ExitStack, server: Served, length: bytes) -> None:
    """However its length is written."""
    client = stack.enter_context(closing(server.connect()))
    client.sendall(POST + length + b"\r\n\r\n")
    with pytest.raises(OSError, match=r"reset|pipe"):
        client.sendall(b"x" * (64 << 20))
    assert server.get("/login")[0] == 200
    assert "Traceback" not in server.proc.output


def test_headers_without_end_are_not_read(stack: ExitStack, server: Served) -> None:
    """Each of them has an allowed length."""
    client = stack.enter_context(closing(server.connect()))
    client.sendall(b"GET / HTTP/1.1\r\n" + (b"X: " + b"y" * 9000 + b"\r\n") * 5)
    assert client.recv(100).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("part", [b"", b"csrf"])
def test_a_body_that_ends_early_is_refused(stack: ExitStack, server: Served, part: bytes) -> None:
    """It is not an error of the server."""
    client = stack.enter_context(closing(server.connect()))
    client.sendall(POST + b"1000\r\n\r\n" + part)
    client.shutdown(socket.SHUT_WR)
    assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert server.get("/login")[0] == 200
    assert "Traceback" not in server.proc.output


def test_slow_clients_make_room(stack: ExitStack, local_shop: FilledShop) -> None:
    """More of them than there are places."""
    server = served(stack, local_shop)
    halves = (b"GET / HTTP/1.1\r\nHost: loc", POST + b"1000\r\n\r\ncsrf", b"")
    slow = connections(stack, server)
    for number, client in enumerate(slow):
        with suppress(OSError):  # it has made room already
            client.sendall(halves[number % 3])
    check_pages(server, slow[-1])
    with suppress(ConnectionResetError):
        assert slow[0].recv(100) == b""
    assert "Traceback" not in server.proc.output


def test_clients_without_a_handshake_make_room(
    stack: ExitStack, local_shop: FilledShop, tmp_path: Path
) -> None:
    """With TLS. One that speaks HTTP instead leaves no traceback."""
    made = Authority(tmp_path).issue("dashboard")
    server = served(stack, local_shop, "--tls-cert", str(made.cert), "--tls-key", str(made.key))
    assert not server.send(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP")
    check_pages(server, connections(stack, server)[-1])
    assert "Traceback" not in server.proc.output


def connections(stack: ExitStack, server: Served) -> list[socket.socket]:
    """Return more connections than the server has places."""
    return [stack.enter_context(closing(server.connect())) for _ in range(CONNECTIONS + 100)]


def check_pages(server: Served, slow: socket.socket, *paths: str) -> None:
    """Check that another client gets pages while the server waits for a slow one."""
    for path in paths or ("/login",):
        assert server.get(path)[0] == 200
    slow.setblocking(False)
    with pytest.raises(BlockingIOError):
        slow.recv(1)
