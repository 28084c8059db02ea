"""Dummy credentials, and boto3 clients for servers on loopback."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

REGION = "us-east-1"
ACCOUNT = "123456789012"
REAL = "TESTS_AWS"
"""If set to 1, the environment is unchanged: tests on AWS itself need its credentials."""

_MEANINGLESS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
    # No file or server of this machine may override this.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    # Tests must not reach loopback through a proxy of the machine.
    "NO_PROXY": "127.0.0.1,localhost",
}
_TELLING = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_REGION")


def stand_in(environment: MutableMapping[str, str]) -> None:
    """Replace the credentials in an environment with dummy ones."""
    for name in _TELLING:
        environment.pop(name, None)
    environment.update(_MEANINGLESS)


def surroundings() -> dict[str, str]:
    """Return this process' environment with dummy credentials."""
    environment = dict(os.environ)
    stand_in(environment)
    return environment


def new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the product read the environment anew, as a new process does, until the test ends."""
    import boto3

    from qdo.system.per_process import PerProcess

    monkeypatch.setattr("qdo.brokers.aws.clients.sessions", PerProcess(boto3.Session))


def client(service: str, endpoint: str, *, region: str = REGION, **config: Any) -> Any:
    """Return a boto3 client of a loopback server, without retries and with a timeout of 10 seconds.

    :param config: settings of `botocore.config.Config`, over these.
    """
    import boto3  # takes a while, and most tests do without
    from botocore.config import Config

    settings: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 5,
        "read_timeout": 10,
        "proxies": {},
        **config,
    }
    if service == "s3":
        settings.setdefault("s3", {"addressing_style": "path"})
    session = boto3.session.Session(
        aws_access_key_id="testing", aws_secret_access_key="testing", region_name=region
    )
    return session.client(service, endpoint_url=endpoint, config=Config(**settings))
