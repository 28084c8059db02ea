"""An operator and an app, on both coordinators and on two brokers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app_runs import OperatorDesk


@pytest.fixture(params=["files", "servers"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OperatorDesk]:
    """An operator of an app with two files, or with PostgreSQL and ZooKeeper."""
    servers = request.param == "servers"
    broker = request.getfixturevalue("postgresql_url") if servers else None
    coordinator = request.getfixturevalue("zookeeper_url" if servers else "embedded_url")
    desk = OperatorDesk("desk", tmp_path, coordinator, broker)
    yield desk
    desk.close()
