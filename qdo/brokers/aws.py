"""Clients of boto3: one session for a process, and as many clients as there are uses.

A client may be used by many threads or greenlets at once; making one may not, because the
session's caches are shared: that is done under a lock.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from typing import Any

import qdo
from qdo.brokers.aws_address import Place
from qdo.describe import describe
from qdo.errors import AwsError, SettingsError

try:
    import boto3
    from botocore.config import Config
except ImportError as error:
    raise SettingsError(
        name="broker", reason="sqs:// and kinesis:// need boto3: pip install 'qdo[aws]'"
    ) from error

# Behind the check above: these need boto3 as well.
from qdo.brokers.aws_errors import BOTO_ERRORS, translation
from qdo.brokers.aws_wire import (
    Calls,
    ClientCalls,
    WireCalls,
    checked,
    expect_answers,
    is_direct,
    retrieving,
)

CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
"""Default time-out of an answer; a long poll needs its own, longer than it waits."""
ATTEMPTS = 3
"""Default of how often a request is made in all; only for those that may be repeated."""

_lock = threading.Lock()
_sessions: dict[int, Any] = {}
"""The session of this process, by its number: a fork must not share what its parent has open."""


def _renew_lock() -> None:
    """Let go of what another thread of the parent held, who is not in a forked child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def make_client(
    place: Place,
    *,
    connections: int = 10,
    read_seconds: float = READ_SECONDS,
    attempts: int = ATTEMPTS,
) -> Any:
    """Return a new client of boto3; no request is made.

    :param connections: requests that can be open at once; further ones wait.
    :param read_seconds: how long an answer may take: longer than a long poll waits.
    :param attempts: how often a request is made in all, by botocore's standard retries; 1 where
        the caller repeats requests by itself.
    :raises CredentialsError: the configuration files of AWS cannot be used.
    :raises SettingsError: something else of what AWS's variables and files say cannot be used.
    """
    config = Config(
        region_name=place.region,
        connect_timeout=CONNECT_SECONDS,
        read_timeout=read_seconds,
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": attempts},
        tcp_keepalive=True,
        user_agent_extra=f"qdo/{qdo.__version__}",
        # Whatever does as S3 does at an endpoint has seldom a host name for each bucket.
        s3={"addressing_style": "path" if place.endpoint else "auto"},
    )
    try:
        with _lock:
            session = _session()
            if session.region_name is None:  # assuming a role takes requests as well
                session._session.set_config_variable("region", place.region)
            _credentials(session)
            client = session.client(
                place.service,
                region_name=place.region,
                endpoint_url=place.endpoint,
                config=config,
            )
    except (*BOTO_ERRORS, ValueError) as error:  # an endpoint that is no URL is a ValueError
        fault = translation(error, place, "service", place.service)
        if type(fault) is not AwsError:
            raise fault from error
        reason = f"boto3 cannot use what AWS's variables and files say: {describe(error)}"
        raise SettingsError(name="broker", reason=reason) from error
    expect_answers(client)
    return client


def make_calls(
    place: Place,
    target: str,
    methods: Mapping[str, str],
    *,
    connections: int,
    read_seconds: float = READ_SECONDS,
    version: str = "1.0",
) -> Calls:
    """Return what makes requests that are made very often; none is made now.

    They are not repeated by themselves. Their answers are what JSON has, or, where a proxy is in
    use, what boto3 makes of it: bytes and datetimes for base64 and numbers.

    :param target: begins the names of actions in the JSON protocol, as in ``AmazonSQS``.
    :param methods: of a boto3 client, by action.
    :param version: of the JSON protocol that the service has.
    :raises CredentialsError: the configuration files of AWS cannot be used.
    :raises AwsUnreachableError: the certificates to trust cannot be read.
    """
    client = make_client(place, connections=connections, read_seconds=read_seconds, attempts=1)
    with _lock:
        session = _session()
        if not is_direct(client):
            return ClientCalls(client, methods)
        credentials = _credentials(session)
        certificates = session._session.get_config_variable("ca_bundle")
    try:
        return WireCalls(
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


@functools.cache
def regions() -> tuple[str, ...]:
    """Return the regions that this version of boto3 knows."""
    with _lock:
        session = _session()
        found = {
            region
            for partition in session.get_available_partitions()
            for region in session.get_available_regions("sqs", partition)
        }
    return tuple(sorted(found))


def _credentials(session: Any) -> Any:
    """Return the credentials of a session, as its clients have them; None where there are none."""
    with retrieving():
        return checked(session.get_credentials())


def _session() -> Any:
    """Return the session of this process; call it with the lock held."""
    pid = os.getpid()
    if pid not in _sessions:
        _sessions.clear()
        _sessions[pid] = boto3.Session()
    return _sessions[pid]
