"""Requests in AWS's JSON protocol without the machinery of a boto3 client.

A request through a boto3 client takes 0.8 ms of a core, twice for every ten messages, and that
is most of what consuming costs; this takes 0.25 ms (`bench/sqs.py`). Credentials, their
renewal, the endpoint, the signature and the certificates that are trusted are boto3's all the
same. Where it is told of a proxy its client is used.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import ujson
from botocore import exceptions as boto
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.utils import get_environ_proxies

from qdo.describe import describe

_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
"""What a connection says that the other side closed while it was idle."""
_REQUEST_ID = "x-amzn-RequestId"
"""A header of every answer of AWS."""
_OF_OBJECTS = ("GetObject", "PutObject")
"""Actions of S3 whose answers have an ETag."""
_SHOWN_BYTES = 100


class ForeignAnswerError(boto.HTTPClientError):  # type: ignore[misc]
    """An answer that is not one of AWS."""

    fmt = "it answered {status} with what is no answer of AWS: {shown}"


class Calls(Protocol):
    """Makes requests."""

    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request and return its answer; raises what boto3's clients raise."""

    def close(self) -> None:
        """Let go of connections."""


class ClientCalls:
    """Makes requests through a client of boto3.

    :param methods: its methods, by action.
    """

    def __init__(self, client: Any, methods: Mapping[str, str]) -> None:
        self._client = client
        self._methods = {action: getattr(client, name) for action, name in methods.items()}

    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._methods[action](**value)
        return answer

    def close(self) -> None:
        self._client.close()


def is_direct(client: Any) -> bool:
    """Return whether no proxy is between here and the endpoint of a client of boto3."""
    return not get_environ_proxies(client.meta.endpoint_url) and not client.meta.config.proxies


class WireCalls:
    """Makes requests over connections of its own; for greenlets or threads.

    :param client: of boto3, for its endpoint and region; not used for requests.
    :param credentials: of a session of boto3.
    :param certificates: file or folder of those to trust; None: those that REQUESTS_CA_BUNDLE
        names, as for boto3's clients, or those that boto3 brings along.
    :param target: begins the name of every action, as in ``AmazonSQS``.
    :param version: of the protocol, as the service has it.
    :param read_seconds: how long an answer may take.
    :param connections: idle connections that are kept at most.
    :raises SSLError: the certificates cannot be read.
    """

    def __init__(
        self,
        client: Any,
        credentials: Any,
        certificates: str | None,
        target: str,
        *,
        version: str,
        connect_seconds: float,
        read_seconds: float,
        connections: int,
    ) -> None:
        self._endpoint: str = client.meta.endpoint_url
        parts = urlsplit(self._endpoint)
        self._address = parts.hostname or "", parts.port
        self._path = parts.path or "/"
        # What is signed has to be what is sent.
        self._url = self._endpoint if parts.path else f"{self._endpoint}/"
        self._credentials = credentials
        self._service = client.meta.service_model.signing_name
        self._region = client.meta.region_name
        self._headers = {
            "Content-Type": f"application/x-amz-json-{version}",
            "User-Agent": client.meta.config.user_agent.split(" ")[0]
            + " "
            + (client.meta.config.user_agent_extra or ""),
        }
        self._target = target
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._connections = connections
        self._tls = None
        if parts.scheme == "https":
            trusted = certificates or os.environ.get("REQUESTS_CA_BUNDLE") or get_cert_path(True)
            try:
                self._tls = _trusting(trusted)
            except OSError as error:
                reason = f"certificates of {trusted}: {error}"
                raise boto.SSLError(endpoint_url=self._endpoint, error=reason) from error

    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        headers = {**self._headers, "X-Amz-Target": f"{self._target}.{action}"}
        body = ujson.dumps(value, ensure_ascii=False, escape_forward_slashes=False).encode()
        request = AWSRequest("POST", self._url, headers=headers, data=body)
        if self._credentials is None:
            raise boto.NoCredentialsError
        frozen = self._credentials.get_frozen_credentials()
        SigV4Auth(frozen, self._service, self._region).add_auth(request)
        status, content, known = self._exchange(body, dict(request.headers.items()))
        if status != 200:
            raise _refusal(action, status, content)
        answer = answer_of(content, known)
        if answer is None:
            raise ForeignAnswerError(status=status, shown=_shown(content))
        return answer

    def _exchange(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, bool]:
        """Send a request, again if it went to a connection that was closed already."""
        while True:
            kept = self._idle.pop() if self._idle else None
            connection = kept if kept is not None else self._connected()
            try:
                connection.request("POST", self._path, body, headers)
                response = connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if kept is not None and isinstance(error, _STALE):
                    continue
                raise self._unreachable(error) from error
            except BaseException:
                connection.close()  # an answer may still come: nobody else must get it
                raise
            if response.will_close or len(self._idle) >= self._connections:
                connection.close()
            else:
                self._idle.append(connection)
            return response.status, content, response.getheader(_REQUEST_ID) is not None

    def _connected(self) -> http.client.HTTPConnection:
        host, port = self._address
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=self._connect_seconds)
        else:
            connection = http.client.HTTPSConnection(
                host, port, timeout=self._connect_seconds, context=self._tls
            )
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise boto.SSLError(endpoint_url=self._endpoint, error=error) from error
        except TimeoutError as error:
            raise boto.ConnectTimeoutError(endpoint_url=self._endpoint, error=error) from error
        except OSError as error:
            raise boto.EndpointConnectionError(endpoint_url=self._endpoint, error=error) from error
        connection.sock.settimeout(self._read_seconds)
        return connection

    def _unreachable(self, error: Exception) -> boto.BotoCoreError:
        late = isinstance(error, TimeoutError)
        kind = boto.ReadTimeoutError if late else boto.ConnectionClosedError
        made: boto.BotoCoreError = kind(endpoint_url=self._endpoint, error=error)
        return made

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def answer_of(content: bytes, known: bool) -> dict[str, Any] | None:
    """Return what an answer in the JSON protocol says; None: it is not one of AWS.

    A proxy, a gateway or a login page may answer with status 200 as well, and to a boto3 client
    that is an answer in which everything is missing: no messages, or no queues.

    :param known: whether it came with the number of the request; only then may it be empty.
    """
    if not content:
        return {} if known else None
    try:
        answer = ujson.loads(content)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _shown(content: bytes) -> str:
    return content[:_SHOWN_BYTES].decode(errors="replace") or "nothing"


def checked(credentials: Any) -> Any:
    """Have credentials of boto3 raise what its clients raise also where a renewal fails.

    A program that prints no credentials, or such that have expired, is a ValueError, an OSError or
    a RuntimeError to boto3.
    """
    if credentials is not None and not hasattr(credentials, "_qdo_checked"):
        plain = credentials.get_frozen_credentials

        def get_frozen_credentials() -> Any:
            with retrieving():
                return plain()

        credentials.get_frozen_credentials = get_frozen_credentials
        credentials._qdo_checked = True
    return credentials


@contextlib.contextmanager
def retrieving() -> Iterator[None]:
    """Turn what boto3 raises where credentials cannot be had into what its clients raise."""
    try:
        yield
    except boto.BotoCoreError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise boto.CredentialRetrievalError(
            provider="AWS", error_msg=describe(error)
        ) from error


def expect_answers(client: Any) -> None:
    """Have a client of boto3 raise where an answer in the JSON protocol, or of S3, is foreign.

    To boto3 a page of HTML with status 200 says that an object was stored, and is the content of
    one that was asked for.
    """
    if client.meta.service_model.service_name == "s3":
        client.meta.events.register("before-parse", _refuse_foreign_of_s3)
    elif client.meta.service_model.resolved_protocol == "json":
        client.meta.events.register("before-parse", _refuse_foreign)


def _refuse_foreign(response_dict: Mapping[str, Any], **_: Any) -> None:
    status, content = response_dict["status_code"], response_dict["body"]
    if status < 300 and answer_of(content, _REQUEST_ID in response_dict["headers"]) is None:
        raise ForeignAnswerError(status=status, shown=_shown(content))


def _refuse_foreign_of_s3(
    operation_model: Any, response_dict: Mapping[str, Any], **_: Any
) -> None:
    status, headers = response_dict["status_code"], response_dict["headers"]
    # S3 names the request in every answer. Not all that do as it does say so, but what they say of
    # an object has its ETag, and what they say else is XML or nothing.
    if status >= 300 or "etag" in headers or any(n.lower().startswith("x-amz") for n in headers):
        return
    page = str(headers.get("content-type", "")).lower().startswith("text/html")
    if page or operation_model.name in _OF_OBJECTS:
        content = response_dict["body"]
        if not isinstance(content, bytes):  # a stream
            content = content.read(_SHOWN_BYTES)
        raise ForeignAnswerError(status=status, shown=_shown(content))


def _trusting(certificates: str) -> ssl.SSLContext:
    # As strict as boto3's clients: ssl.create_default_context is more so from Python 3.13 on, and
    # refuses authorities of one's own that these accept.
    context: ssl.SSLContext = create_urllib3_context()
    context.check_hostname = True  # boto3's clients look at that by themselves
    if os.path.isdir(certificates):
        context.load_verify_locations(capath=certificates)
    else:
        context.load_verify_locations(cafile=certificates)
    return context


def _refusal(action: str, status: int, content: bytes) -> boto.ClientError:
    """Return the error of an answer that is none."""
    value = answer_of(content, known=True)
    if value is None:
        value = {"message": _shown(content)}
    code = str(value.get("__type", "") or status).rsplit("#", 1)[-1]
    reason = value.get("message") or value.get("Message") or ""
    return boto.ClientError(
        {
            "Error": {"Code": code, "Message": str(reason)},
            "ResponseMetadata": {"HTTPStatusCode": status},
        },
        action,
    )
