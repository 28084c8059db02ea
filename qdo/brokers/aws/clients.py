"""Creates boto3 clients from one session for each process, and checks their credentials.

Many threads or greenlets may use a client at once. Clients share the session's caches, so a lock
protects their creation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from qdo._version import __version__
from qdo.broker_errors import AwsError
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.errors import BOTO_ERRORS, translation
from qdo.brokers.aws.http import Calls, ClientCalls, HttpCalls, check_protocol, is_direct
from qdo.errors import SettingsError
from qdo.system.per_process import PerProcess
from qdo.text import describe

# The session of this process. A session is not thread-safe, so use it within `PerProcess.locked`.
sessions: PerProcess[Any] = PerProcess(boto3.Session)
CONNECT_SECONDS = 5.0
# The default time to wait for a response; a long poll needs a longer timeout than its wait.
READ_SECONDS = 20.0
# The default number of attempts; only repeatable calls use it.
ATTEMPTS = 3


def checked(credentials: Any) -> Any:
    """Make credentials raise the same errors as boto3's clients when a renewal fails."""
    # If the credential process prints no credentials or expired credentials, boto3 raises a
    # ValueError, an OSError or a RuntimeError.
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
    """Translate errors of credential retrieval into errors that boto3's clients raise."""
    try:
        yield
    except boto.BotoCoreError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise boto.CredentialRetrievalError(provider="AWS", error_msg=describe(error)) from error


def make_client(
    place: ServiceAddress,
    *,
    connections: int = 10,
    read_seconds: float = READ_SECONDS,
    attempts: int = ATTEMPTS,
) -> Any:
    """Return a new boto3 client; make no call.

    :param connections: the maximum number of open calls; further calls wait.
    :param attempts: the maximum number of attempts that botocore makes; 1 if the caller retries.
    :raises CredentialsError: boto3 cannot read the configuration files of AWS.
    :raises SettingsError: another setting in AWS's variables or files is invalid.
    """
    config = Config(
        region_name=place.region,
        connect_timeout=CONNECT_SECONDS,
        read_timeout=read_seconds,
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": attempts},
        tcp_keepalive=True,
        user_agent_extra=f"qdo/{__version__}",
        # Few services that are compatible with S3 have a host name for each bucket.
        s3={"addressing_style": "path" if place.endpoint else "auto"},
    )
    try:
        with sessions.locked() as session:
            if session.region_name is None:  # boto3 also needs a region to assume a role
                session._session.set_config_variable("region", place.region)
            _credentials(session)
            client = session.client(
                place.service,
                region_name=place.region,
                endpoint_url=place.endpoint,
                config=config,
            )
    except (*BOTO_ERRORS, ValueError) as error:  # an endpoint that is not a URL is a ValueError
        fault = translation(error, place, "service", place.service)
        if type(fault) is not AwsError:
            raise fault from error
        reason = f"boto3 cannot use the settings in AWS's variables and files: {describe(error)}"
        raise SettingsError(name="broker", reason=reason) from error
    check_protocol(client)
    return client


def make_calls(
    place: ServiceAddress,
    target: str,
    methods: Mapping[str, str],
    *,
    connections: int,
    read_seconds: float = READ_SECONDS,
    version: str = "1.0",
) -> Calls:
    """Return an object that makes frequent calls without retries; make no call yet.

    The responses contain JSON types. Through a proxy, responses contain boto3's types: bytes
    instead of base64, and datetimes instead of numbers.

    :param target: the prefix of action names in the JSON protocol, such as ``AmazonSQS``.
    :param methods: the name of the boto3 client's method for each action.
    :raises CredentialsError, AwsUnreachableError: qdo cannot read AWS's files or the certificates.
    """
    client = make_client(place, connections=connections, read_seconds=read_seconds, attempts=1)
    with sessions.locked() as session:
        if not is_direct(client):
            return ClientCalls(client, methods)
        credentials = _credentials(session)
        certificates = session._session.get_config_variable("ca_bundle")
    try:
        return HttpCalls(
            client,
            credentials,
            certificates,
            target,
            version=version,
            connect_seconds=CONNECT_SECONDS,
            read_seconds=read_seconds,
            connections=connections,
        )
    except BOTO_ERRORS as error:
        raise translation(error, place, "service", place.service) from error


def _credentials(session: Any) -> Any:
    """Return the credentials of a session and its clients; None if it has no credentials."""
    with retrieving():
        return checked(session.get_credentials())
