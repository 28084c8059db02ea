"""Requests in AWS's JSON protocol over connections of qdo's own, to a server that looks closely."""

from __future__ import annotations

import contextlib
import datetime
import gc
import ipaddress
import json
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest
from botocore import exceptions as boto
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from qdo.broker_errors import AwsUnreachableError
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.clients import make_calls, make_client
from qdo.brokers.aws.errors import code_of, is_transient
from qdo.brokers.aws.http import Calls, ClientCalls, HttpCalls
from qdo.brokers.sqs.api import METHODS
from qdo.brokers.sqs.codec import TARGET
from tests.support.aws.clients import new_session

REGION = "us-east-1"
SECRET = "testing"
BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


class Handler(BaseHTTPRequestHandler):
    """Records requests, and returns the configured answers."""

    protocol_version = "HTTP/1.1"
    server: LocalHttpServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        self.server.requests.append((dict(self.headers.items()), body))
        self.server.peers.append(self.client_address[1])
        self.server.answer(self)

    def reply(self, status: int, content: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class LocalHttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.paths: list[str] = []
        self.peers: list[int] = []
        self.answer: Callable[[Handler], None] = lambda handler: handler.reply(200, b"{}")
        self.scheme = "http"
        self.below = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}{self.below}"


@pytest.fixture
def server() -> Iterator[LocalHttpServer]:
    with LocalHttpServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", *BUNDLES):
        monkeypatch.delenv(name, raising=False)
    # The session of the process may have been made with the settings of another test.
    new_session(monkeypatch)


class Maker(Protocol):
    def __call__(self, server: LocalHttpServer, read_seconds: float = 5.0) -> Calls: ...


@pytest.fixture
def calls() -> Iterator[Maker]:
    """Makes requests to a server; closes its connections at the end."""
    with contextlib.ExitStack() as made:

        def make(server: LocalHttpServer, read_seconds: float = 5.0) -> Calls:
            place = ServiceAddress("sqs", REGION, server.url)
            found = make_calls(place, TARGET, METHODS, connections=4, read_seconds=read_seconds)
            made.callback(found.close)
            return found

        yield make


def test_what_is_sent_is_what_was_signed(server: LocalHttpServer, calls: Maker) -> None:
    """Computed again from the received request, the signature is the same."""
    server.answer = lambda handler: handler.reply(200, b'{"Messages": [{"Body": "\xc3\xbc"}]}')
    answer = calls(server).call("ReceiveMessage", {"QueueUrl": "q", "n": 1, "text": "ü/"})
    assert answer == {"Messages": [{"Body": "ü"}]}
    ((headers, body),) = server.requests
    assert json.loads(body) == {"QueueUrl": "q", "n": 1, "text": "ü/"}
    assert headers["X-Amz-Target"] == "AmazonSQS.ReceiveMessage"
    assert headers["Content-Type"] == "application/x-amz-json-1.0"
    assert "qdo/" in headers["User-Agent"]
    assert _signature(headers, body, server.url + "/") in headers["Authorization"]


def test_an_endpoint_may_have_a_path(server: LocalHttpServer, calls: Maker) -> None:
    """The request goes there as those of a boto3 client do, and is signed for that."""
    server.below = "/some/where"
    place = ServiceAddress("sqs", REGION, server.url)
    make_client(place, attempts=1).list_queues()
    calls(server).call("ReceiveMessage", {})
    assert server.paths == ["/some/where"] * 2
    for headers, body in server.requests:
        assert _signature(headers, body, server.url) in headers["Authorization"]


def _signature(headers: dict[str, str], body: bytes, url: str) -> str:
    signed = headers["Authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    lower = {name.lower(): value for name, value in headers.items()}
    request = AWSRequest("POST", url, {name: lower[name] for name in signed}, body)
    request.context["timestamp"] = lower["x-amz-date"]
    auth = SigV4Auth(Credentials("testing", SECRET), "sqs", REGION)
    text = auth.string_to_sign(request, auth.canonical_request(request))
    return str(auth.signature(text, request))


def test_a_connection_is_used_again(server: LocalHttpServer, calls: Maker) -> None:
    """A new one for each request would cost more than the request."""
    made = calls(server)
    for _ in range(3):
        made.call("ReceiveMessage", {})
    assert len(set(server.peers)) == 1


def test_a_connection_that_was_closed_while_idle_is_replaced(
    server: LocalHttpServer, calls: Maker
) -> None:
    """The server ends it without a word; the request is made all the same, once."""

    def closing(handler: Handler) -> None:
        handler.reply(200, b"{}")
        handler.close_connection = True

    server.answer = closing
    made = calls(server)
    for _ in range(3):
        assert made.call("ReceiveMessage", {}) == {}
    assert len(set(server.peers)) == 3
    assert len(server.requests) == 3


def test_connections_beyond_those_that_are_kept_are_closed(
    server: LocalHttpServer, calls: Maker
) -> None:
    """At once, by qdo: left to Python they would be reported as leaks."""
    together = threading.Barrier(6)

    def answer(handler: Handler) -> None:
        together.wait(10)
        handler.reply(200, b"{}")

    server.answer = answer
    found = calls(server)
    asking = [
        threading.Thread(target=found.call, args=("ReceiveMessage", {"n": number}))
        for number in range(6)
    ]
    with warnings.catch_warnings(record=True) as leaks:
        warnings.simplefilter("always", ResourceWarning)
        for each in asking:
            each.start()
        for each in asking:
            each.join(10)
        gc.collect()
    assert len(server.requests) == 6
    assert [str(each.message) for each in leaks] == []


def test_a_refusal_has_its_code_and_its_reason(server: LocalHttpServer, calls: Maker) -> None:
    """Like boto3's own errors, so both are reported in the same way."""
    content = b'{"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "none such"}'
    server.answer = lambda handler: handler.reply(400, content)
    with pytest.raises(boto.ClientError, match="none such") as caught:
        calls(server).call("ReceiveMessage", {})
    assert code_of(caught.value) == "QueueDoesNotExist"
    assert caught.value.operation_name == "ReceiveMessage"
    assert not is_transient(caught.value)


@pytest.mark.parametrize("content", [b"<html>busy</html>", b"", b"[1]", b'"x"'])
def test_an_error_page_passes(server: LocalHttpServer, calls: Maker, content: bytes) -> None:
    """Whatever the content of a balancer's answer with status 503."""
    server.answer = lambda handler: handler.reply(503, content)
    with pytest.raises(boto.ClientError) as caught:
        calls(server).call("ReceiveMessage", {})
    assert is_transient(caught.value)


def test_an_answer_that_is_no_json_passes(server: LocalHttpServer, calls: Maker) -> None:
    """It is not taken for an empty one."""
    server.answer = lambda handler: handler.reply(200, b"<html>login</html>")
    with pytest.raises(boto.HTTPClientError):
        calls(server).call("ReceiveMessage", {})


def test_half_an_answer_is_none(server: LocalHttpServer, calls: Maker) -> None:
    """The connection broke in the middle; it is not used again."""

    def half(handler: Handler) -> None:
        handler.reply(200, b'{"Messages"', length=100)
        handler.close_connection = True

    server.answer = half
    made = calls(server)
    with pytest.raises(boto.ConnectionClosedError) as caught:
        made.call("ReceiveMessage", {})
    assert is_transient(caught.value)
    server.answer = lambda handler: handler.reply(200, b"{}")
    assert made.call("ReceiveMessage", {}) == {}


def test_an_answer_that_does_not_come_is_given_up(server: LocalHttpServer, calls: Maker) -> None:
    """After the time that it may take; its connection is not used for the next request."""
    over = threading.Event()
    server.answer = lambda handler: over.wait(10) and None
    made = calls(server, read_seconds=0.2)
    with pytest.raises(boto.ReadTimeoutError):
        made.call("ReceiveMessage", {})
    over.set()
    server.answer = lambda handler: handler.reply(200, b'{"n": 2}')
    assert made.call("ReceiveMessage", {}) == {"n": 2}


def test_nobody_there_is_out_of_reach() -> None:
    """Told with the address."""
    place = ServiceAddress("sqs", REGION, "http://127.0.0.1:1")
    made = make_calls(place, TARGET, METHODS, connections=1)
    with pytest.raises(boto.EndpointConnectionError, match=r"127\.0\.0\.1:1"):
        made.call("ReceiveMessage", {})


def test_a_proxy_is_left_to_boto3(
    server: LocalHttpServer, calls: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows how to go through it."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert isinstance(calls(server), HttpCalls)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert isinstance(calls(server), ClientCalls)


# --- TLS ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", BUNDLES)
def test_certificates_are_checked(
    server: LocalHttpServer,
    calls: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """An untrusted certificate ends the connection; boto3's settings can add trusted ones."""
    _wrap(server, tmp_path)
    with pytest.raises(boto.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        calls(server).call("ReceiveMessage", {})
    assert server.requests == []
    monkeypatch.setenv(variable, str(tmp_path / "certificate.pem"))
    new_session(monkeypatch)
    assert calls(server).call("ReceiveMessage", {}) == {}


def test_the_certificate_is_that_of_the_host(
    server: LocalHttpServer, calls: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is trusted, and of another host, ends the connection."""
    _wrap(server, tmp_path, address="127.0.0.2")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate.pem"))
    with pytest.raises(boto.SSLError, match="not valid for '127"):
        calls(server).call("ReceiveMessage", {})
    assert server.requests == []


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_certificates_that_cannot_be_read_are_named(
    server: LocalHttpServer,
    calls: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
) -> None:
    """In an error of qdo, not by a traceback."""
    server.scheme = "https"
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(AwsUnreachableError, match=str(bundle)):
        calls(server)


def _wrap(server: LocalHttpServer, folder: Path, address: str = "127.0.0.1") -> None:
    """Have a server speak TLS, with a certificate that it signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.IPAddress(ipaddress.ip_address(address))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.scheme = "https"
