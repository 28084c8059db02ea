"""Requests in AWS's JSON protocol over connections of qdo's own, to a server that looks closely."""

from __future__ import annotations

import contextlib
import gc
import json
import ssl
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from botocore import exceptions as boto
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from qdo.broker_errors import AwsUnreachableError
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.clients import make_calls, make_client
from qdo.brokers.aws.errors import code_of, is_transient
from qdo.brokers.aws.http import Calls, ClientCalls, HttpCalls
from qdo.brokers.sqs.api import METHODS
from qdo.brokers.sqs.codec import TARGET
from tests.support.aws.clients import new_session
from tests.support.security.certificates import Authority
from tests.support.webhook_receiver import Answer, Receiver, WebhookRequest, receiving

REGION = "us-east-1"
SECRET = "testing"
BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@pytest.fixture
def server() -> Iterator[Receiver]:
    """A server that answers with an empty object."""
    with receiving() as receiver:
        receiver.default = Answer(body=b"{}")
        yield receiver


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", *BUNDLES):
        monkeypatch.delenv(name, raising=False)
    # The session of the process may have been made with the settings of another test.
    new_session(monkeypatch)


class Maker(Protocol):
    def __call__(self, server: Receiver, read_seconds: float = 5.0) -> Calls: ...


@pytest.fixture
def calls() -> Iterator[Maker]:
    """Makes requests to a server; closes its connections at the end."""
    with contextlib.ExitStack() as made:

        def make(server: Receiver, read_seconds: float = 5.0) -> Calls:
            place = ServiceAddress("sqs", REGION, server.url)
            found = make_calls(place, TARGET, METHODS, connections=4, read_seconds=read_seconds)
            made.callback(found.close)
            return found

        yield make


def test_what_is_sent_is_what_was_signed(server: Receiver, calls: Maker) -> None:
    """Computed again from the received request, the signature is the same."""
    server.default = Answer(200, b'{"Messages": [{"Body": "\xc3\xbc"}]}')
    answer = calls(server).call("ReceiveMessage", {"QueueUrl": "q", "n": 1, "text": "ü/"})
    assert answer == {"Messages": [{"Body": "ü"}]}
    (request,) = server.requests
    headers, body = request.headers, request.body
    assert json.loads(body) == {"QueueUrl": "q", "n": 1, "text": "ü/"}
    assert headers["x-amz-target"] == "AmazonSQS.ReceiveMessage"
    assert headers["content-type"] == "application/x-amz-json-1.0"
    assert "qdo/" in headers["user-agent"]
    assert _signature(request, server.url + "/") in headers["authorization"]


def test_an_endpoint_may_have_a_path(server: Receiver, calls: Maker) -> None:
    """The request goes there as those of a boto3 client do, and is signed for that."""
    server.url += "/some/where"
    place = ServiceAddress("sqs", REGION, server.url)
    make_client(place, attempts=1).list_queues()
    calls(server).call("ReceiveMessage", {})
    assert [each.path for each in server.requests] == ["/some/where"] * 2
    for request in server.requests:
        assert _signature(request, server.url) in request.headers["authorization"]


def _signature(received: WebhookRequest, url: str) -> str:
    headers = received.headers
    signed = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    request = AWSRequest("POST", url, {name: headers[name] for name in signed}, received.body)
    request.context["timestamp"] = headers["x-amz-date"]
    auth = SigV4Auth(Credentials("testing", SECRET), "sqs", REGION)
    text = auth.string_to_sign(request, auth.canonical_request(request))
    return str(auth.signature(text, request))


def test_a_connection_is_used_again(server: Receiver, calls: Maker) -> None:
    """A new one for each request would cost more than the request."""
    made = calls(server)
    for _ in range(3):
        made.call("ReceiveMessage", {})
    assert server.connections == 1


def test_a_connection_that_was_closed_while_idle_is_replaced(
    server: Receiver, calls: Maker
) -> None:
    """The server ends it without a word; the request is made all the same, once."""
    server.default = Answer(body=b"{}", closes=True)
    made = calls(server)
    for _ in range(3):
        assert made.call("ReceiveMessage", {}) == {}
    assert (server.connections, len(server.requests)) == (3, 3)


def test_connections_beyond_those_that_are_kept_are_closed(server: Receiver, calls: Maker) -> None:
    """At once, by qdo: left to Python they would be reported as leaks."""
    together = threading.Barrier(6)
    server.before_answer = lambda: together.wait(10)
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


def test_a_refusal_has_its_code_and_its_reason(server: Receiver, calls: Maker) -> None:
    """Like boto3's own errors, so both are reported in the same way."""
    content = b'{"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "none such"}'
    server.default = Answer(400, content)
    with pytest.raises(boto.ClientError, match="none such") as caught:
        calls(server).call("ReceiveMessage", {})
    assert code_of(caught.value) == "QueueDoesNotExist"
    assert caught.value.operation_name == "ReceiveMessage"
    assert not is_transient(caught.value)


@pytest.mark.parametrize("content", [b"<html>busy</html>", b"", b"[1]", b'"x"'])
def test_an_error_page_passes(server: Receiver, calls: Maker, content: bytes) -> None:
    """Whatever the content of a balancer's answer with status 503."""
    server.default = Answer(503, content)
    with pytest.raises(boto.ClientError) as caught:
        calls(server).call("ReceiveMessage", {})
    assert is_transient(caught.value)


def test_an_answer_that_is_no_json_passes(server: Receiver, calls: Maker) -> None:
    """It is not taken for an empty one."""
    server.default = Answer(200, b"<html>login</html>")
    with pytest.raises(boto.HTTPClientError):
        calls(server).call("ReceiveMessage", {})


def test_half_an_answer_is_none(server: Receiver, calls: Maker) -> None:
    """The connection broke in the middle; it is not used again."""
    half = Answer(200, b'{"Messages"', {"content-length": "100"}, closes=True)
    server.answers = [half]
    made = calls(server)
    with pytest.raises(boto.ConnectionClosedError) as caught:
        made.call("ReceiveMessage", {})
    assert is_transient(caught.value)
    assert made.call("ReceiveMessage", {}) == {}


def test_an_answer_that_does_not_come_is_given_up(server: Receiver, calls: Maker) -> None:
    """After the time that it may take; its connection is not used for the next request."""
    over = threading.Event()
    server.before_answer = lambda: over.wait(10)
    made = calls(server, read_seconds=0.2)
    with pytest.raises(boto.ReadTimeoutError):
        made.call("ReceiveMessage", {})
    over.set()
    server.default = Answer(200, b'{"n": 2}')
    assert made.call("ReceiveMessage", {}) == {"n": 2}


def test_nobody_there_is_out_of_reach() -> None:
    """Told with the address."""
    place = ServiceAddress("sqs", REGION, "http://127.0.0.1:1")
    made = make_calls(place, TARGET, METHODS, connections=1)
    with pytest.raises(boto.EndpointConnectionError, match=r"127\.0\.0\.1:1"):
        made.call("ReceiveMessage", {})


def test_a_proxy_is_left_to_boto3(
    server: Receiver, calls: Maker, monkeypatch: pytest.MonkeyPatch
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
    server: Receiver,
    calls: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """An untrusted certificate ends the connection; boto3's settings can add trusted ones."""
    bundle = _wrap(server, tmp_path)
    with pytest.raises(boto.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        calls(server).call("ReceiveMessage", {})
    assert server.requests == []
    monkeypatch.setenv(variable, bundle)
    new_session(monkeypatch)
    assert calls(server).call("ReceiveMessage", {}) == {}


def test_the_certificate_is_that_of_the_host(
    server: Receiver, calls: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is trusted, and of another host, ends the connection."""
    monkeypatch.setenv("AWS_CA_BUNDLE", _wrap(server, tmp_path, address="127.0.0.2"))
    with pytest.raises(boto.SSLError, match="not valid for '127"):
        calls(server).call("ReceiveMessage", {})
    assert server.requests == []


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_certificates_that_cannot_be_read_are_named(
    server: Receiver,
    calls: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
) -> None:
    """In an error of qdo, not by a traceback."""
    server.url = server.url.replace("http:", "https:")
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(AwsUnreachableError, match=str(bundle)):
        calls(server)


def _wrap(server: Receiver, folder: Path, address: str = "127.0.0.1") -> str:
    """Have a server speak TLS; return the file with the certificate of its authority."""
    authority = Authority(folder)
    own = authority.issue("server", host=address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = server.url.replace("http:", "https:")
    return str(authority.path)
