"""A ZooKeeper server with TLS and accounts for the tests of this folder."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import zookeeper
from tests.support.security.fleet import SecureFleet
from tests.support.security.zookeeper import SecureZooKeeper, secure_zookeeper_server


@pytest.fixture(scope="session")
def secure_zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureZooKeeper]:
    """One server with TLS and SASL for all tests of a run."""
    zookeeper.require()
    with secure_zookeeper_server(tmp_path_factory.mktemp("secure-zookeeper")) as server:
        yield server


@pytest.fixture
def chroot() -> str:
    """A root of the test's own."""
    return f"/test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def tls(secure_zookeeper: SecureZooKeeper) -> dict[str, Any]:
    """Settings for connections with TLS."""
    return {
        "coordinator_ca": str(secure_zookeeper.authority.path),
        "coordinator_cert": str(secure_zookeeper.client.cert),
        "coordinator_key": str(secure_zookeeper.client.key),
    }


@pytest.fixture
def fleet(
    tmp_path: Path, secure_zookeeper: SecureZooKeeper, chroot: str, tls: dict[str, Any]
) -> SecureFleet:
    """An app whose clients connect with TLS."""
    return SecureFleet(tmp_path / "app", coordinator=secure_zookeeper.url(chroot), **tls)
