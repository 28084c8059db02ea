"""The small HTTP server, with clients that are slow, hostile or many."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from qdo.system import http_server
from qdo.system.http_server import (
    MOST_CONNECTIONS,
    REQUEST_BYTES,
    HttpAnswer,
    HttpServer,
)
from tests.support.processes import wait_until

BIG = b"x" * (8 << 20)


def broken() -> HttpAnswer:
    raise RuntimeError("a secret")


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[HttpServer]:
    routes: dict[str, Callable[[], HttpAnswer]] = {
        "/ok": lambda: HttpAnswer(200, b"fine\n"),
        "/big": lambda: HttpAnswer(503, BIG, "application/json"),
        "/broken": broken,
    }
    made = HttpServer(request.param, 0, routes)
    made.start()
    yield made
    made.close()


def client(server: HttpServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=10)


def talk(server: HttpServer, request: bytes) -> bytes:
    """Return everything that a server answers to a request."""
    with client(server) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def get(server: HttpServer, path: str, method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.request(method, path)
    return connection.getresponse()


def test_answers_get_and_head(server: HttpServer) -> None:
    """A HEAD has the headers of the GET, and no body."""
    answer = get(server, "/ok?x=1")
    assert (answer.status, answer.read()) == (200, b"fine\n")
    answer = get(server, "/ok", "HEAD")
    assert (answer.headers["Content-Length"], answer.read()) == ("5", b"")


def test_sends_a_long_answer_whole(server: HttpServer) -> None:
    answer = get(server, "/big")
    assert (answer.status, answer.read() == BIG) == (503, True)
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
        ("/ok/", 404),
        ("/../ok", 404),
        ("/%6fk", 404),
        ("//ok", 404),
        ("/ok%00", 404),
        ("/etc/passwd", 404),
        ("/" + "a" * 4000, 404),
    ],
)
def test_knows_only_its_paths(server: HttpServer, path: str, status: int) -> None:
    answer = get(server, path)
    assert answer.status == status
    assert b"passwd" not in answer.read()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_refuses_other_methods(server: HttpServer, method: str) -> None:
    """Whatever the client sends behind its request, it gets the answer."""
    body = b"y" * (8 << 20)
    head = f"{method} /ok HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    assert talk(server, head + body).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /ok",
        b"GET /ok HTTP/2.0",
        b"GET http://x/ok HTTP/1.1",
        b"get /ok HTTP/1.1",
        b"GET  /ok HTTP/1.1",
        b"GET /\xff\x00 HTTP/1.1",
        b"\x16\x03\x01\x02\x00\x01",  # TLS
        b"",
    ],
)
def test_refuses_what_is_not_a_request(server: HttpServer, request_line: bytes) -> None:
    answer = talk(server, request_line + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert re.fullmatch(rb"[\n\r -~]*", answer)


def test_refuses_a_megabyte_of_headers(server: HttpServer) -> None:
    """It reads no more than it must, and the client gets the answer."""
    request = b"GET /ok HTTP/1.1\r\nX: " + b"z" * (1 << 20)
    assert talk(server, request).startswith(b"HTTP/1.1 431 ")
    assert len(request) > REQUEST_BYTES


def test_an_error_shows_nothing_to_clients(server: HttpServer) -> None:
    answer = get(server, "/broken")
    assert (answer.status, b"secret" in answer.read()) == (500, False)
    assert get(server, "/ok").status == 200


def test_half_a_request_holds_up_nobody(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed after its time, though it sends a byte now and then."""
    monkeypatch.setattr(http_server, "SECONDS", 1.0)
    with client(server) as slow:
        began = time.monotonic()
        slow.sendall(b"GET /ok HTTP/1.1\r\n")
        assert get(server, "/ok").status == 200
        slow.settimeout(0.05)
        while True:
            with contextlib.suppress(TimeoutError):
                if not slow.recv(1):
                    break
            with contextlib.suppress(OSError):
                slow.send(b"x")
        assert 0.9 < time.monotonic() - began < 5.0


def test_a_client_that_does_not_read_is_dropped(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SECONDS", 0.5)
    with client(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        wait_until(lambda: bool(server._connections), "it is connected")
        assert get(server, "/ok").status == 200
        wait_until(lambda: not server._connections, "it is dropped")


def test_more_clients_than_places_hold_up_nobody(server: HttpServer) -> None:
    """The oldest one makes room for the next."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(client(server)) for _ in range(2 * MOST_CONNECTIONS)]
        assert get(server, "/ok").status == 200
        assert len(server._connections) <= MOST_CONNECTIONS
        assert idle[0].recv(1) == b""


def test_serves_clients_at_the_same_time(server: HttpServer) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(get(server, "/big").status)) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [503] * 20


def test_a_used_port_is_an_error(server: HttpServer) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpServer(*server.address, {})


def test_close_ends_the_thread_and_its_clients(server: HttpServer) -> None:
    other = HttpServer("127.0.0.1", 0, {})
    other.start()
    with client(other) as idle:
        wait_until(lambda: bool(other._connections), "it is connected")
        other.close()
        assert idle.recv(1) == b""
    assert not other._thread.is_alive()
