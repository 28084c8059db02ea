"""Make requests in AWS's JSON protocol without the overhead of a boto3 client; check responses.

A request takes 0.25 ms of a core, and 0.8 ms through a boto3 client (`bench/sqs.py`). A consumer
makes two requests for ten messages, so a client would be most of its cost. Boto3 still provides the
endpoint, credentials, signatures and trusted certificates. If a proxy is configured, qdo uses the
boto3 client.
"""

from __future__ import annotations

import http.client
import os
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import ujson
from botocore import exceptions as boto
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.utils import get_environ_proxies

from qdo.system.http_responses import BoundedResponse

# A header of every response of AWS, except those of S3.
_REQUEST_ID = "x-amzn-RequestId"
# The S3 actions with an ETag in their responses.
_OF_OBJECTS = ("GetObject", "PutObject")
_SHOWN_BYTES = 100
# Errors that mean that the server has closed an idle connection.
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class NotAnAwsResponseError(boto.HTTPClientError):  # type: ignore[misc]
    fmt = "received a response with status {status} that is not from AWS: {shown}"


def answer_of(content: bytes, known: bool) -> dict[str, Any] | None:
    """Return the content of a response in the JSON protocol; None if it is not from AWS."""
    # A proxy, a gateway or a login page may also respond with status 200. A boto3 client would take
    # the response of a proxy for an empty list of messages or queues. Only a response with a
    # request id (`known`) may be empty.
    if not content:
        return {} if known else None
    try:
        answer = ujson.loads(content)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _shown(content: bytes) -> str:
    return content[:_SHOWN_BYTES].decode(errors="replace") or "nothing"


def check_protocol(client: Any) -> None:
    """Make a boto3 client reject responses that are not from AWS."""
    # If a proxy returns an HTML page with status 200, boto3 believes that it stored an object, or
    # returns the page as the object's content.
    if client.meta.service_model.service_name == "s3":
        client.meta.events.register("before-parse", _reject_foreign_of_s3)
    elif client.meta.service_model.resolved_protocol == "json":
        client.meta.events.register("before-parse", _reject_foreign)


def _reject_foreign(response_dict: Mapping[str, Any], **_: Any) -> None:
    status = response_dict["status_code"]
    content = response_dict["body"]
    if status < 300 and answer_of(content, _REQUEST_ID in response_dict["headers"]) is None:
        raise NotAnAwsResponseError(status=status, shown=_shown(content))


def _reject_foreign_of_s3(operation_model: Any, response_dict: Mapping[str, Any], **_: Any) -> None:
    status = response_dict["status_code"]
    headers = response_dict["headers"]
    # S3 sends a request id in every response. Some compatible services send no id. But the
    # responses of these services about an object have an ETag, and all other responses are XML or
    # empty.
    if status >= 300 or "etag" in headers or any(n.lower().startswith("x-amz") for n in headers):
        return
    page = str(headers.get("content-type", "")).lower().startswith("text/html")
    if page or operation_model.name in _OF_OBJECTS:
        content = response_dict["body"]
        if not isinstance(content, bytes):  # a stream
            content = content.read(_SHOWN_BYTES)
        raise NotAnAwsResponseError(status=status, shown=_shown(content))


def _refusal(action: str, status: int, content: bytes) -> boto.ClientError:
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


class Calls(Protocol):
    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request and return the response; raise the same errors as boto3's clients."""

    def close(self) -> None:
        """Close the connections."""


class ClientCalls:
    """Makes requests through a boto3 client; `methods` maps each action to a method name."""

    def __init__(self, client: Any, methods: Mapping[str, str]) -> None:
        self._client = client
        self._methods = {action: getattr(client, name) for action, name in methods.items()}

    def call(self, action: str, value: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._methods[action](**value)
        return answer

    def close(self) -> None:
        self._client.close()


def is_direct(client: Any) -> bool:
    """Return whether a boto3 client reaches its endpoint without a proxy."""
    return not get_environ_proxies(client.meta.endpoint_url) and not client.meta.config.proxies


class HttpCalls:
    """Makes requests over its own pool of connections. Safe for greenlets and threads.

    :param client: a boto3 client that provides the endpoint and region, but makes no requests.
    :param certificates: a file or folder with trusted certificates. None: like boto3's clients, use
        the certificates in REQUESTS_CA_BUNDLE or in boto3.
    :param target: the prefix of all action names, such as ``AmazonSQS``.
    :param connections: the maximum number of idle connections to keep.
    :raises SSLError: qdo cannot read the certificates.
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
        # The sent URL must equal the signed URL.
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
            raise NotAnAwsResponseError(status=status, shown=_shown(content))
        return answer

    def _exchange(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, bool]:
        """Send a request; repeat it if the server had closed the idle connection."""
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
                # Gevent's Timeout and GreenletExit are not Exceptions. A late response must not
                # reach the next request, so close the connection after every error.
                connection.close()
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
        connection.response_class = BoundedResponse
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


def _trusting(certificates: str) -> ssl.SSLContext:
    # Check as strictly as boto3's clients. Since Python 3.13, ssl.create_default_context is
    # stricter and rejects private authorities that boto3 accepts.
    context: ssl.SSLContext = create_urllib3_context()
    context.check_hostname = True  # boto3's clients check the host name in other code
    if os.path.isdir(certificates):
        context.load_verify_locations(capath=certificates)
    else:
        context.load_verify_locations(cafile=certificates)
    return context
