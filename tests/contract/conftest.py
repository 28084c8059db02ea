"""Brokers that are logs, for tests that run on each of them, and the file of an embedded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qdo.brokers.base import Broker
from qdo.testing.contracts.fixtures import broker as broker
from tests.support.brokers import LOGS, opening


@pytest.fixture(params=LOGS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Open further connections to the broker, as other processes would."""
    with opening(request.param, tmp_path, request) as connect:
        yield connect


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "messages.db")


@pytest.fixture
def url(path: str) -> str:
    """The address of that file."""
    return f"sqlite:{path}"
