"""A receiver of webhooks on loopback, with configured answers, which records its requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    drip_seconds: float = 0.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Many connections are opened at once; the usual backlog of 5 would reject some."""


class Receiver:
    """An HTTP server.

    :ivar requests: the received requests, in order.
    :ivar connections: how many were made.
    :ivar answers: the answers to the next requests; an empty 200 to all others.
    """

    def __init__(self) -> None:
        self.requests: list[WebhookRequest] = []
        self.connections = 0
        self.answers: list[Answer] = []
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _handler(receiver) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                receiver.connections += 1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.requests.append(WebhookRequest(self.path, headers, body))
                answer = receiver.answers.pop(0) if receiver.answers else Answer()
                self.send_response(answer.status)
                length = str(len(answer.body))
                for name, value in {"content-length": length, **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if not answer.drip_seconds:
                    self.wfile.write(answer.body)
                for byte in answer.body if answer.drip_seconds else b"":
                    self.wfile.write(bytes([byte]))
                    if receiver.closing.wait(answer.drip_seconds):
                        self.close_connection = True
                        return

            def handle(self) -> None:
                try:
                    super().handle()
                except ConnectionError:
                    self.close_connection = True

            def finish(self) -> None:
                try:
                    super().finish()
                except ConnectionError:
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver for the time of the block."""
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()
