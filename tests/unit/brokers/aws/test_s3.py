"""Bodies in S3, from a server that sends fewer headers than AWS does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from qdo.broker_errors import ObjectTooLargeError
from qdo.brokers.aws.address import BodyPointer, ServiceAddress
from qdo.brokers.aws.s3 import Objects

POINTER = BodyPointer("b", "k")


class Chunked(BaseHTTPRequestHandler):
    """Gives each object in chunks, and so without its length."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"x"')
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def objects() -> Iterator[Objects]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Chunked) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        objects = Objects(
            ServiceAddress("sqs", "eu-west-1", f"http://127.0.0.1:{server.server_port}"), "b"
        )
        yield objects
        objects.close()
        server.shutdown()
        thread.join()


def test_a_body_is_read_whose_length_is_not_said(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdo.brokers.aws.s3.MAX_S3_BODY", 5)
    assert objects.get(POINTER) == b"hello"


def test_it_is_not_read_beyond_what_may_be_read(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdo.brokers.aws.s3.MAX_S3_BODY", 3)
    with pytest.raises(ObjectTooLargeError, match="4"):
        objects.get(POINTER)
