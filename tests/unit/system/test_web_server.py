"""The web server, with clients that are slow, hostile or many."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from qdo.system import web_server
from qdo.system.web_server import (
    MOST_BODY_BYTES,
    MOST_HEADER_BYTES,
    MOST_THREADS_OF_ONE,
    Admission,
    WebServer,
)
from tests.support.processes import wait_until

BIG = b"x" * (8 << 20)
PLACES = 20
POST = b"POST /ok HTTP/1.1\r\n"


class SmallApp:
    """A WSGI app.

    :ivar go_on: ends the wait of `/wait`.
    """

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.waiting = 0
        self.closed = False

    def __call__(
        self, environ: dict[str, Any], start: Callable[..., Callable[[bytes], object]]
    ) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/broken":
            raise OSError("a secret")
        if path == "/wait":
            self.waiting += 1
            self.go_on.wait(20)
        write = start("503 Service Unavailable" if path == "/big" else "200 OK", [("X-Test", "1")])
        write(b"fine: ")
        return self._parts(environ)

    def _parts(self, environ: dict[str, Any]) -> Iterator[bytes]:
        try:
            yield BIG if environ["PATH_INFO"] == "/big" else environ["wsgi.input"].read()
        finally:
            self.closed = True


class JudgingApp(SmallApp):
    """Judges requests by their heads; each path is a line of its own."""

    def admit(self, environ: dict[str, Any]) -> Admission:
        path, most = environ["PATH_INFO"], 100 if environ["PATH_INFO"] == "/small" else 80_000
        if path == "/judged":
            return Admission(self._judge)
        return Admission(None, most, path)

    def _judge(
        self, environ: dict[str, Any], start: Callable[..., Callable[[bytes], object]]
    ) -> Iterable[bytes]:
        start("401 Unauthorized", [("X-Test", "1")])
        return [b"no"]


@pytest.fixture
def app() -> SmallApp:
    return SmallApp()


@pytest.fixture
def judge() -> Iterator[tuple[WebServer, JudgingApp]]:
    app = JudgingApp()
    made = WebServer(app, ("127.0.0.1", 0), connections=2 * PLACES)
    yield made, app
    app.go_on.set()
    made.close()


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest, app: SmallApp) -> Iterator[WebServer]:
    made = WebServer(app, (request.param, 0), connections=PLACES)
    yield made
    app.go_on.set()
    made.close()


def client(server: WebServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=10)


def talk(server: WebServer, request: bytes) -> bytes:
    """Return everything that a server answers to a request, until it closes the connection."""
    answer = b""
    with client(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(request)
        while data := connection.recv(1 << 20):
            answer += data
    return answer


def get(server: WebServer, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=10)) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_serves_an_app(server: WebServer, app: SmallApp) -> None:
    """With the body of a request; what the app returns is closed."""
    assert get(server, "/ok?x=1") == (200, b"fine: ")
    assert get(server, "/ok", "POST", b"y" * MOST_BODY_BYTES) == (200, b"fine: " + b"y" * 65536)
    assert app.closed


def test_an_answer_to_head_has_no_body(server: WebServer) -> None:
    answer = talk(server, b"HEAD /ok HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n")


def test_sends_a_long_answer_whole(server: WebServer) -> None:
    status, body = get(server, "/big")
    assert (status, body == b"fine: " + BIG) == (503, True)


def test_requests_of_one_connection_do_not_wait(server: WebServer) -> None:
    """A body that waited for the client to acknowledge the headers would take 40 ms each time."""
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    with contextlib.closing(connection):
        took = []
        for _ in range(50):
            began = time.monotonic()
            connection.request("GET", "/ok")
            assert connection.getresponse().read() == b"fine: "
            took.append(time.monotonic() - began)
        assert min(took) < 0.03


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /ok HTTP/2.0\r\n\r\n", 400),
        (b"POST /ok\r\n\r\n", 400),
        (b"GET /\xff \x00 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),  # TLS
        (POST + b"Content-Length: -5\r\n\r\n", 400),
        (POST + b"Content-Length: +5\r\n\r\n12345", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 3\r\n\r\n12345", 400),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 411),
        (POST + b"Transfer-Encoding:\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (POST + b"\r\n{}", 411),
        *(
            (POST + b"Content-Length: " + length + b"\r\n\r\n12345", 400)
            for length in (b"0x5", b"5 5", b"5, 5", b"5_0", b"", b"\xb2", b"five", b"5.0")
        ),
        (POST + b"X: a\rContent-Length: 5\r\n\r\n12345", 400),
        (POST + b"Content-Length: 5\rX: a\r\n\r\n12345", 400),
        (POST + b"Content-Length: 5\r\nX\0: a\r\n\r\n12345", 400),
        (POST + b"Content-Length: 5\r\nX: a\0b\r\n\r\n12345", 400),
        (POST + b"Content-Length : 5\r\n\r\n12345", 400),
        (POST + b" Content-Length: 5\r\n\r\n12345", 400),
        (POST + b"Content-Length: 5\r\nno colon\r\n\r\n12345", 400),
        (POST + b"Content-Length: 5\r\n: no name\r\n\r\n12345", 400),
        (b"GET /ok\rX HTTP/1.1\r\n\r\n", 400),
        (b"GET /ok\0 HTTP/1.1\r\n\r\n", 400),
        (b"GET /ok  HTTP/1.1\r\n\r\n", 400),
        (b"GET /ok HTTP/1.1 x\r\n\r\n", 400),
        (b"GET /ok HTTP/1.1.1\r\n\r\n", 400),
        (b"GET /ok HTTP/x\r\n\r\n", 400),
        (POST + b"Content-Length: 65537\r\n\r\n", 413),
        (b"GET /" + b"a" * 9000, 414),
        (b"GET /ok HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET /ok HTTP/1.1\r\nX: " + b"z" * MOST_HEADER_BYTES + b"\r\n", 431),
        (b"GET /ok HTTP/1.1\r\n" + (b"X: " + b"z" * 9000 + b"\r\n") * 4, 431),
    ],
)
def test_refuses_bad_requests(server: WebServer, request_: bytes, status: int) -> None:
    answer = talk(server, request_)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert re.fullmatch(rb"[\r\n -~]*", answer)


def test_a_whole_address_is_taken_for_its_path(server: WebServer) -> None:
    """A server must accept it, see RFC 9112, section 3.2.2."""
    for address in (b"http://host/ok", b"HTTPS://host:1/ok?x=1"):
        answer = talk(server, b"GET " + address + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_head_may_decide_before_the_body_comes(judge: tuple[WebServer, JudgingApp]) -> None:
    """The response comes at once, and is not lost with the bytes that are on their way."""
    server, _ = judge
    with client(server) as connection:
        connection.sendall(
            b"POST /judged HTTP/1.1\r\nContent-Length: 900000\r\n\r\n" + 99_999 * b"x"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
    assert talk(server, b"POST /small HTTP/1.1\r\nContent-Length: 101\r\n\r\n").startswith(
        b"HTTP/1.1 413 "
    )
    assert get(server, "/small", "POST", b"y" * 100) == (200, b"fine: " + b"y" * 100)


def test_slow_requests_of_one_line_leave_threads_to_others(
    judge: tuple[WebServer, JudgingApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further ones wait for their turn, or are refused if it does not come in time."""
    server, app = judge
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(client(server)) for _ in range(MOST_THREADS_OF_ONE)]
        for each in slow:
            each.sendall(b"GET /wait HTTP/1.1\r\n\r\n")
        wait_until(lambda: app.waiting == MOST_THREADS_OF_ONE, "the app works")
        slow.append(stack.enter_context(client(server)))
        slow[-1].sendall(b"GET /wait HTTP/1.1\r\n\r\n")
        assert get(server, "/ok")[0] == 200
        monkeypatch.setattr(web_server, "REQUEST_SECONDS", 0.2)
        answer = talk(server, b"GET /wait HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in answer
        assert app.waiting == MOST_THREADS_OF_ONE
        app.go_on.set()
        assert all(each.recv(100).startswith(b"HTTP/1.1 200 ") for each in slow)
    assert get(server, "/wait")[0] == 200


def test_all_bodies_together_are_bounded(
    judge: tuple[WebServer, JudgingApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are on their way count as far as they have come, not as they are announced.

    A small one is stored all the same.
    """
    monkeypatch.setattr(web_server, "MOST_BODIES_BYTES", 90_000)
    server, _ = judge
    with client(server) as announced, client(server) as half:
        announced.sendall(b"POST /ok HTTP/1.1\r\nContent-Length: 80000\r\n\r\nx")
        half.sendall(b"POST /ok HTTP/1.1\r\nContent-Length: 70000\r\n\r\n" + b"x" * 66_000)
        wait_until(
            lambda: get(server, "/ok", "POST", b"y" * 50_000)[0] == 503, "the first one counts"
        )
        assert get(server, "/ok", "POST", b"y" * 32_000)[0] == 200
    wait_until(lambda: get(server, "/ok", "POST", b"y" * 50_000)[0] == 200, "it has gone")


def test_an_error_shows_nothing_to_clients(
    server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    status, body = get(server, "/broken")
    assert (status, b"secret" in body) == (500, False)
    assert "a secret" in caplog.text
    assert get(server, "/ok")[0] == 200


def test_half_a_request_holds_up_nobody(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed after its time, though it sends a byte now and then."""
    monkeypatch.setattr(web_server, "REQUEST_SECONDS", 1.0)
    with client(server) as slow:
        began = time.monotonic()
        slow.sendall(b"GET /ok HTTP/1.1\r\n")
        assert get(server, "/ok")[0] == 200
        slow.settimeout(0.05)
        while True:
            with contextlib.suppress(TimeoutError):
                if not slow.recv(1):
                    break
            with contextlib.suppress(OSError):
                slow.send(b"x")
        assert time.monotonic() - began > 0.9


def test_half_a_body_is_refused(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, or at once if the client says that nothing follows."""
    monkeypatch.setattr(web_server, "REQUEST_SECONDS", 0.5)
    request = POST + b"Content-Length: 10\r\n\r\nabc"
    assert talk(server, request).startswith(b"HTTP/1.1 408 ")
    with client(server) as half:
        half.sendall(request)
        half.shutdown(socket.SHUT_WR)
        assert half.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_does_not_read_is_dropped(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "SEND_SECONDS", 0.5)
    with client(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert get(server, "/ok")[0] == 200
        wait_until(lambda: is_broken(slow), "it is dropped")


def is_broken(connection: socket.socket) -> bool:
    try:
        connection.send(b"x")
    except OSError:
        return True
    return False


def test_more_clients_than_places_hold_up_nobody(server: WebServer, app: SmallApp) -> None:
    """The one that has waited longest makes room; one that waits for the app stays."""
    with contextlib.ExitStack() as stack:
        working = stack.enter_context(client(server))
        working.sendall(b"GET /wait HTTP/1.1\r\n\r\n")
        wait_until(lambda: app.waiting == 1, "the app works")
        idle = [stack.enter_context(client(server)) for _ in range(2 * PLACES)]
        assert get(server, "/ok")[0] == 200
        assert idle[0].recv(1) == b""
        app.go_on.set()
        assert working.recv(100).startswith(b"HTTP/1.1 200 ")


def test_serves_clients_at_the_same_time(server: WebServer, app: SmallApp) -> None:
    """While the app waits for one of them, too."""
    found: list[int] = []

    def ask(path: str) -> None:
        found.append(get(server, path)[0])

    waiting = threading.Thread(target=ask, args=("/wait",))
    threads = [threading.Thread(target=ask, args=("/big",)) for _ in range(PLACES - 5)]
    for thread in (waiting, *threads):
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [503] * len(threads)
    app.go_on.set()
    waiting.join(20)
    assert found[-1] == 200


def test_a_used_port_is_an_error(server: WebServer, app: SmallApp) -> None:
    with pytest.raises(OSError, match="in use"):
        WebServer(app, server.address)


def test_close_ends_the_thread_and_its_clients(app: SmallApp) -> None:
    other = WebServer(app, ("127.0.0.1", 0))
    with client(other) as idle:
        idle.sendall(b"GET /ok HTTP/1.1\r\n\r\n")
        wait_until(lambda: idle.recv(1000).endswith(b"fine: "), "it is served")
        other.close()
        assert idle.recv(1) == b""
    assert not other._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        client(other)
