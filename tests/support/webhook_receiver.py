"""A receiver of webhooks on loopback, with configured answers, which records its requests.

It also stands for services of AWS that answer in every way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """A received request. Names of headers are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A configured answer.

    :ivar drip_seconds: pause after each byte of the body.
    :ivar closes: whether the connection ends behind it, without a word.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    drip_seconds: float = 0.0
    closes: bool = False


class Receiver(ThreadingHTTPServer):
    """An HTTP server.

    :ivar requests: the received requests, in order.
    :ivar connections: how many were made.
    :ivar answers: the answers to the next requests.
    :ivar default: the answer to all others, an empty 200.
    :ivar before_answer: called after each request.
    """

    request_queue_size = 128
    """Many connections are opened at once; the usual backlog of 5 would reject some."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[WebhookRequest] = []
        self.connections = 0
        self.answers: list[Answer] = []
        self.default = Answer()
        self.before_answer: Callable[[], object] = lambda: None
        self.closing = threading.Event()

    def get_request(self) -> Any:
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append(WebhookRequest(self.path, headers, body))
        self.server.before_answer()
        answer = self.server.answers.pop(0) if self.server.answers else self.server.default
        self.close_connection |= answer.closes
        self.send_response(answer.status)
        for name, value in {"content-length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        step = 1 if answer.drip_seconds else len(answer.body) or 1
        for begin in range(0, len(answer.body), step):
            self.wfile.write(answer.body[begin : begin + step])
            if answer.drip_seconds and self.server.closing.wait(answer.drip_seconds):
                self.close_connection = True
                return

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver for the time of the block."""
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.closing.set()
            receiver.shutdown()
            thread.join(5)
