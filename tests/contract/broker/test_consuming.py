"""The contract of every broker with the owner of a queue, for logs and mailboxes.

The embedded broker and the one of `qdo.testing`, standard and FIFO queues of SQS, Kinesis.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.testing.contracts.fixtures import BrokerSetup
from qdo.testing.contracts.fixtures import owner as owner
from qdo.testing.contracts.owners import *
from tests.support.brokers import KINDS, bench


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerSetup]:
    with bench(request.param, tmp_path, request) as made:
        yield made
