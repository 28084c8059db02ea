"""The contract of every broker with a store for dead letters; SQS is a mailbox.

The same tests run a second time in a process that gevent has patched: see test_under_gevent.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qdo.brokers.base import Broker, Row
from qdo.testing.contracts.dead_letters import *
from tests.support.brokers import LOGS, MAILBOXES, opening
from tests.support.brokers import rows as rows_of


@pytest.fixture(params=[*LOGS, *MAILBOXES])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Open further connections to the broker, as other processes would."""
    with opening(request.param, tmp_path, request) as connect:
        yield connect


@pytest.fixture
def rows() -> Callable[[Broker, str], list[Row]]:
    return rows_of
