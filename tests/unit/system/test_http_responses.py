"""Servers that send lines without end to the webhook program and to qdo's requests to AWS."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from botocore import exceptions as boto

from qdo import Message
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.clients import make_calls
from qdo.brokers.sqs.api import METHODS
from qdo.brokers.sqs.codec import TARGET
from qdo.programs.webhook import Courier, UndeliveredError, WebhookOptions, new_secret
from qdo.system.http_responses import INTERIM_LIMIT, TRAILER_LIMIT
from tests.support.aws.clients import new_session

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
MANY = 20_000
"""An attacker sends more; these end, so that a failing test does, too."""

FLOODS = [
    pytest.param(INTERIM * MANY + PLAIN, id="interim"),
    pytest.param(CHUNKED + b"a: b\r\n" * MANY + b"\r\n", id="trailers"),
]
FEW = [
    pytest.param(INTERIM * INTERIM_LIMIT + PLAIN, id="interim"),
    pytest.param(CHUNKED + b"a: b\r\n" * (TRAILER_LIMIT - 1) + b"\r\n", id="trailers"),
]


@contextlib.contextmanager
def responding(response: bytes) -> Iterator[str]:
    """Run a server with one response to all requests; yield its address."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(response)
                    connection.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def deliver(url: str) -> None:
    with contextlib.closing(Courier(WebhookOptions(url=url, secret=new_secret()))) as courier:
        courier.deliver(Message("q", 1, {}, id="1"))


def call(url: str) -> None:
    place = ServiceAddress("sqs", "us-east-1", url)
    made = make_calls(place, TARGET, METHODS, connections=1, read_seconds=5.0)
    with contextlib.closing(made):
        made.call("ReceiveMessage", {})


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    new_session(monkeypatch)


@pytest.mark.parametrize("response", FLOODS)
def test_a_flood_of_lines_is_no_response(response: bytes) -> None:
    with responding(response) as url:
        if response.startswith(INTERIM):
            with pytest.raises(UndeliveredError):
                deliver(url)
        else:
            deliver(url)  # the status is enough
        with pytest.raises(boto.ConnectionClosedError):
            call(url)


@pytest.mark.parametrize("response", FEW)
def test_a_response_may_have_some_more_lines(response: bytes) -> None:
    with responding(response) as url:
        deliver(url)
        call(url)
